"""Generate for many prompts at once: `python examples/offline.py`."""

from penstock import LLM, SamplingParams

PROMPTS = ["Once upon a time", "There was a", {"prompt": "One day there was", "cache_salt": "mine"}]


def main() -> None:
    with LLM() as llm:  # the embedded model; give a folder or a hub id for another
        params = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=12, logprobs=1)
        for output in llm.generate(PROMPTS, params):
            print(f"{output.prompt!r}: {len(output.prompt_token_ids)} prompt tokens")
            for choice in output.outputs:
                print(f"  {choice.text!r}, {choice.finish_reason}, log-probability {choice.cumulative_logprob:.2f}")


if __name__ == "__main__":
    main()
