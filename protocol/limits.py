"""Bounds on what one request may ask for. Each refusal names the limit; those with an option name the option too.

Where an option sets a limit, the number here is its default, and the bound of the option what the engine can do.
"""

from __future__ import annotations

MAX_BODY_BYTES = 32 << 20  # --max-body-bytes
MAX_N = 128  # --max-n
MAX_LOGPROBS = 20  # --max-logprobs; OpenAI's bound for top_logprobs
MAX_STOP_STRINGS = 16  # --max-stop-strings
MOST_STOP_STRINGS = 256  # that a scanner takes
MAX_STOP_LENGTH = 512  # characters of one stop string
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024  # --max-logit-bias
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 16
MAX_JSON_DEPTH = 64  # --max-json-depth
MAX_WHITESPACE = 256  # characters of a pattern for whitespace between JSON tokens
MAX_TOOLS = 512
MAX_TOOL_NAME = 64  # characters; OpenAI's bound
MAX_CHAT_TEMPLATE = 1 << 16  # characters of a request's own
MAX_THINKING = 1 << 24  # tokens
MAX_INPUTS = 2048  # texts of one request for vectors; OpenAI's bound
MAX_PROMPTS = 256  # prompts of one completions request
MAX_CHOICES = 1024  # prompts times n of one request
MAX_CACHE_SALT = 256  # characters
MAX_RID = 256  # characters
MIN_TIMEOUT = 0.001  # seconds; no request ends sooner
MAX_TIMEOUT = 604_800  # seconds, a week
MAX_TOKEN_ID = 2**31 - 1
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1
