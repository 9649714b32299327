"""The commands of the package."""
