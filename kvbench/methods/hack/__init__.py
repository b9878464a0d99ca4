"""HACK and HACK++: heads of two classes, contextual and structural, each with a budget and a policy."""
