"""Vectors of texts, and how similar the texts are: `python examples/embeddings.py`."""

from penstock import LLM

QUERY = "a cat"
DOCUMENTS = ["forty-two", "the cat", "a cat"]


def main() -> None:
    with LLM() as llm:
        vectors = [output.outputs.embedding for output in llm.embed(DOCUMENTS)]
        print(f"{len(vectors)} vectors of {len(vectors[0])} numbers")
        scores = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS)]
        for score, document in sorted(zip(scores, DOCUMENTS, strict=True), reverse=True):
            print(f"{score:.2f} {document}")


if __name__ == "__main__":
    main()
