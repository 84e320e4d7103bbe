"""The release; pyproject.toml reads it from here, so that a source tree knows its version without being installed."""

VERSION = "0.1.0"
