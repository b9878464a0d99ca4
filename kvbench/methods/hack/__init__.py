"""HACK and HACK++: contextual and structural heads with separate budgets and policies."""
