"""Drafts: how they are proposed, and how many are worth their positions. No torch, no clock."""
