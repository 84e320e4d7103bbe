"""Drafts: who proposes them, how many are worth their positions. No torch, no clock."""
