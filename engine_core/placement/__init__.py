"""Which replica a request goes to: decided here, by numbers alone, and carried out by whoever holds the links."""
