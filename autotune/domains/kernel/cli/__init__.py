"""The domain's commands."""
