"""The outer loop over trainers that are replicas of each other: DiLoCo over torchft, or over an object store."""
