"""The executor process."""
