"""The gateway's metrics, each once. What every request touches is a tally (tally.py)."""

from services.gateway.tally import CountTally, HistogramTally, LevelTally
from shared.observe.metrics import counter, gauge, histogram_ms, histogram_ratio

REQUESTS = counter(
    "quire_gateway_requests_total",
    "Requests answered, by route and HTTP status; a stream that failed when it had begun counts with the status of its"
    " error, though HTTP said 200.",
    ("route", "status"),
)
ERRORS = counter("quire_gateway_errors_total", "Errors answered or streamed, by stable code.", ("code",))
IN_FLIGHT_NAME = "quire_gateway_requests_in_flight"
IN_FLIGHT = LevelTally(
    gauge(
        IN_FLIGHT_NAME,
        "Admitted prompts without an outcome; a request with several counts as many.",
    )
)
RETRIES = counter("quire_gateway_retries_total", "Attempts given up and placed again.")
CONTINUED = counter(
    "quire_gateway_continued_total", "Of them, those that went on behind tokens that the client had."
)
RETRIES_REFUSED = counter(
    "quire_gateway_retries_refused_total", "Attempts not repeated because the retry budget was spent."
)
RETRY_BUDGET = gauge("quire_gateway_retry_budget", "Retries that could be made at once.")
TTFT_PREDICTION = HistogramTally(
    histogram_ratio(
        "quire_gateway_ttft_prediction_ratio",
        "First token: measured from placement / predicted by the scheduler.",
    )
)
PREDICTED_STAGES = ("queue_and_compute", "fetch", "transfer", "step")
_STAGE_PREDICTION = histogram_ratio(
    "quire_gateway_stage_prediction_ratio",
    "A stage's time: measured / predicted by the scheduler; a prediction below 1 ms counts as 1 ms."
    " queue_and_compute: the prompt's, from its coming into the engine to its first token but for fetching.",
    ("stage",),
)
STAGE_PREDICTION = tuple(HistogramTally(_STAGE_PREDICTION.labels(stage)) for stage in PREDICTED_STAGES)
ABORTS = counter("quire_gateway_client_aborts_total", "Requests whose client left before the end.")
SLOW_READERS = counter("quire_gateway_slow_readers_total", "Answers cut because the client did not read.")
SPARED = counter(
    "quire_gateway_spared_connections_total",
    "Connections without a request closed for new ones, near the limit of open files.",
)
STALE = counter("quire_gateway_stale_messages_total", "Messages of attempts that were given up.")
MALFORMED = counter("quire_gateway_malformed_total", "Messages that were no messages, by whose.", ("peer",))
PROMPT_TOKENS = CountTally(
    counter("quire_gateway_prompt_tokens_total", "Prompt tokens of completed requests.")
)
CACHED_TOKENS = CountTally(
    counter(
        "quire_gateway_cached_tokens_total",
        "Prompt tokens of completed requests that were found computed; by whom does not matter: by an attempt of the"
        " same request that was given up, too.",
    )
)
OUTPUT_TOKENS = CountTally(
    counter("quire_gateway_output_tokens_total", "Output tokens of completed requests.")
)
TTFT = HistogramTally(
    histogram_ms(
        "quire_gateway_ttft_ms",
        "Streams: request received to the first event with content leaving. An answer in one piece has none.",
    )
)
TPOT = HistogramTally(
    histogram_ms(
        "quire_gateway_tpot_ms",
        "Time per output token after the first, of the longest choice; requests with one prompt.",
        buckets=(1, 2, 5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 500, 1_000),
    )
)
TOKENIZE = HistogramTally(histogram_ms("quire_gateway_tokenize_ms", "Template and tokenizing."))
LOOKUP = HistogramTally(histogram_ms("quire_gateway_tree_lookup_ms", "Prompt-tree look-ups."))
