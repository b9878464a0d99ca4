"""The embedded world: coloured shapes on a plain background, their captions, and a detector that reads them back."""
