"""Decisions and computation. Synchronous: no sockets, no asyncio, no HTTP, no wall clock, no globals."""
