"""What crosses a process boundary: messages, links, limits, errors and options. Imports no other folder of Penstock."""
