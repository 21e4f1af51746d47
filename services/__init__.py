"""Plain classes and functions that actors use; tests drive them without Monarch."""
