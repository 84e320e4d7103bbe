"""Names of spans, events and attributes.

Source: OpenTelemetry semantic conventions, "HTTP spans", and "Generative AI spans" (in development: renamed here as
there). Names without a convention are `penstock.*`.
"""

from __future__ import annotations

# Spans of a request. The api's are named after method and route, and after operation and model (`chat MODEL`).
PROMPT = "prompt"
STREAM = "stream"
TOKENIZE = "tokenize"
COMPILE_GRAMMAR = "compile grammar"
DETOKENIZE = "detokenize"
PREPARE_GRAMMAR = "prepare grammar"
QUEUE = "queue"
PREFILL = "prefill"
DECODE = "decode"
EXECUTE_PREFILL = "execute prefill"
EXECUTE_DECODE = "execute decode"
# Spans of a step and of a start.
STEP = "step"
EXECUTE_STEP = "execute step"
START = "start"

# Events.
FIRST_TOKEN = "first token"
TOKENS = "tokens"
PREEMPTED = "preempted"
RESTARTED = "restarted"  # the executors were lost; running requests are recomputed
ABORTED = "aborted"
CLIENT_LEFT = "client left"
DEADLINE = "deadline exceeded"
MOVED = "tokenizer lost"

# Attributes with a convention.
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_SCHEME = "url.scheme"
ERROR_TYPE = "error.type"
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_MODEL = "gen_ai.request.model"
GEN_AI_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_TOP_P = "gen_ai.request.top_p"
GEN_AI_TOP_K = "gen_ai.request.top_k"
GEN_AI_SEED = "gen_ai.request.seed"
GEN_AI_CHOICES = "gen_ai.request.choice.count"
GEN_AI_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
GEN_AI_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"  # seconds; a metric's name there
GEN_AI_TIME_PER_TOKEN = "gen_ai.server.time_per_output_token"  # seconds; a metric's name there
PROVIDER = "penstock"

# Our own attributes. Times are in seconds.
REQUEST = "penstock.request.id"  # internal, of one prompt
HTTP_REQUEST_ID = "penstock.http.request_id"  # the client's X-Request-Id, or ours
PROMPT_INDEX = "penstock.prompt.index"
PROMPTS = "penstock.prompts"
CHOICE = "penstock.choice"
END = "penstock.end"  # why a choice left its slot or the queue
PROMPT_TOKENS = "penstock.prompt.tokens"
REUSED_TOKENS = "penstock.reused.tokens"  # from the prefix cache
OUTPUT_TOKENS = "penstock.output.tokens"
ACCEPTED_DRAFTS = "penstock.drafts.accepted"
REJECTED_DRAFTS = "penstock.drafts.rejected"
ROWS = "penstock.rows"
CHUNK_START = "penstock.chunk.start"  # its first position
CHUNK_TOKENS = "penstock.chunk.tokens"
STEP_NUMBER = "penstock.step"
EPOCH = "penstock.epoch"
STEPS = "penstock.steps"
BATCH = "penstock.step.rows"
STEP_TOKENS = "penstock.step.tokens"
STEP_CHUNKS = "penstock.step.chunks"
STEP_DRAFTS = "penstock.step.drafts"
STEP_MASKED = "penstock.step.masked"
RUNNING = "penstock.requests.running"
WAITING = "penstock.requests.waiting"
BLOCKS = "penstock.blocks.total"
BLOCKS_USED = "penstock.blocks.used"
UNLINKED = "penstock.unlinked"  # traced requests of the step beyond its links
DEVICE_SECONDS = "penstock.device.seconds"
WAITED_SECONDS = "penstock.waited.seconds"  # of an idle device, before the step or for its bitmasks
MASK_SECONDS = "penstock.masks.seconds"  # of waiting for bitmasks
DRAFTING_SECONDS = "penstock.drafting.seconds"
SKIPPED_PROMPTS = "penstock.prompts.untraced"  # beyond those with a span
TOKENS_SO_FAR = "penstock.tokens"  # of an event
PROCESSES = "penstock.processes"
