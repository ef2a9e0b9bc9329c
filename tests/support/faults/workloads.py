"""The requests of the fault tests, which run once undisturbed and once under a fault."""

from pagestream.v1 import inference_pb2 as pb

QUESTIONS = (
    "Tell me a story about the lighthouse.",
    "Tell me a story about the harbour.",
    "Tell me a story about a cat.",
    "Tell me a story about the baker.",
)
NUM_STREAMS = 16
NUM_TOKENS = 160


def chat_request(number: int, *, model: str = "demo", max_tokens: int = NUM_TOKENS) -> pb.GenerateRequest:
    """Return request `number`: even ones are greedy, odd ones sample with a seed of their own."""
    question = QUESTIONS[number % len(QUESTIONS)]
    seeded = number % 2 == 1
    return pb.GenerateRequest(
        model=model,
        chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content=f"{question}{' ' * (number // 8)}")]),
        sampling=pb.SamplingParams(
            temperature=0.8 if seeded else 0.0,
            top_p=0.95 if seeded else 1.0,
            seed=1_000 + number,
            max_tokens=max_tokens,
            ignore_eos=True,
        ),
    )


def mixed_requests() -> list[pb.GenerateRequest]:
    """Return as many requests as the tests run at once."""
    return [chat_request(number) for number in range(NUM_STREAMS)]
