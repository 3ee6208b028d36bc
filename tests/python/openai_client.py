"""Everything that the OpenAI API serves, through the official client, against a real cluster; a failed assertion fails.

usage: openai_client.py http://HOST:PORT MODEL
"""

import sys

import openai
from openai import OpenAI

base, model = sys.argv[1:]
client = OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=60)
CAPITAL = "The capital of France is"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def refused(error, call, **arguments):
    try:
        call(**{"model": model, **arguments})
    except error as raised:
        return raised
    raise AssertionError(f"{arguments} was not refused")


def models():
    listed = client.models.list().data
    assert [entry.id for entry in listed] == [model], listed
    assert client.models.retrieve(model).owned_by == "lockstep"
    try:
        client.models.retrieve("gpt-9")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    else:
        raise AssertionError("an unknown model was found")


def completions():
    create = client.completions.create
    greedy = {"model": model, "temperature": 0, "max_tokens": 8}
    one = create(prompt=CAPITAL, **greedy)
    text = one.choices[0].text
    assert text.startswith(" Paris"), one
    assert one.choices[0].finish_reason == "length" and one.usage.completion_tokens == 8, one
    assert one.usage.total_tokens == one.usage.prompt_tokens + 8, one
    ids = create(prompt=[504, 3575, 282, 4649, 314], **greedy)
    assert (ids.choices[0].text, ids.usage.prompt_tokens) == (text, 5), ids
    several = create(prompt=[CAPITAL, "Water is made of", CAPITAL], echo=True, **greedy)
    assert [choice.index for choice in several.choices] == [0, 1, 2], several
    assert several.choices[0].text == several.choices[2].text == CAPITAL + text, several
    assert several.usage.completion_tokens == 24, several
    streamed = list(create(prompt=CAPITAL, stream=True, stream_options={"include_usage": True}, **greedy))
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == text, streamed
    assert counts(streamed[-1].usage) == counts(one.usage), streamed[-1]
    likely = create(prompt=CAPITAL, logprobs=3, **greedy).choices[0].logprobs
    assert "".join(likely.tokens) == text and likely.text_offset[1] == len(likely.tokens[0]), likely
    for token, logprob, top in zip(likely.tokens, likely.token_logprobs, likely.top_logprobs, strict=True):
        assert len(top) == 3 and max(top.values()) == top[token] == logprob < 0, likely
    stopped = create(prompt=CAPITAL, stop=[text[4:7]], **greedy).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[:4], "stop"), stopped


def counts(usage):
    """What does not depend on earlier requests."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def chat():
    create = client.chat.completions.create
    greedy = {"model": model, "messages": CHAT, "temperature": 0, "max_completion_tokens": 24}
    whole = create(**greedy)
    message = whole.choices[0].message
    rendered = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{CHAT[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    raw = client.completions.create(model=model, prompt=rendered, temperature=0, max_tokens=24)
    assert message.role == "assistant" and message.content == raw.choices[0].text != "", (whole, raw)
    assert counts(whole.usage) == counts(raw.usage), (whole, raw)
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (whole, raw)]
    assert cached == [0, raw.usage.prompt_tokens // 32 * 32], cached
    assert whole.id.startswith("chatcmpl-") and whole._request_id == whole.id and whole.system_fingerprint, whole
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    assert create(**{**greedy, "messages": parts}).choices[0].message.content == message.content
    chunks = list(create(stream=True, stream_options={"include_usage": True}, **greedy))
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == message.content, chunks
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason, chunks
    assert counts(chunks[-1].usage) == counts(whole.usage) and all(chunk.usage is None for chunk in chunks[:-1]), chunks
    likely = create(logprobs=True, top_logprobs=2, **greedy).choices[0].logprobs.content
    assert len(likely) == whole.usage.completion_tokens or whole.choices[0].finish_reason == "stop", likely
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token for entry in likely), likely
    assert bytes(likely[0].bytes).decode() == likely[0].token, likely


def seeds_and_choices():
    create = client.chat.completions.create
    sampled = {"model": model, "messages": CHAT, "temperature": 1.5, "max_tokens": 16}
    choices = create(n=3, seed=7, **sampled).choices
    texts = [choice.message.content for choice in choices]
    assert [choice.index for choice in choices] == [0, 1, 2] and len(set(texts)) > 1, texts
    # Each choice can be had alone, by its own seed.
    assert [create(seed=7 + index, **sampled).choices[0].message.content for index in range(3)] == texts
    streamed = ["", "", ""]
    for chunk in create(n=3, seed=7, stream=True, **sampled):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts, (streamed, texts)
    vllm = {"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "stop_token_ids": []}
    forced = create(extra_body=vllm, **sampled)
    greedy = create(extra_body={"ignore_eos": True}, **{**sampled, "temperature": 0})
    assert forced.usage.completion_tokens == 16 and forced.choices[0].message == greedy.choices[0].message, forced


def errors():
    create = client.chat.completions.create
    error = refused(openai.BadRequestError, create, messages=CHAT, temperature=-1)
    assert (error.param, error.type) == ("temperature", "invalid_request_error"), error
    assert refused(openai.BadRequestError, create, messages=[]).param == "messages"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert refused(openai.BadRequestError, create, messages=CHAT, tools=tools).param == "tools"
    assert refused(openai.BadRequestError, create, messages=CHAT, extra_body={"top_p": "x"}).param == "top_p"
    assert refused(openai.NotFoundError, create, messages=CHAT, model="gpt-9").code == "model_not_found"
    long = refused(openai.BadRequestError, client.completions.create, prompt="word " * 9000)
    assert "the model serves 8192" in long.message, long
    assert refused(openai.NotFoundError, client.embeddings.create, input="x").code == "unknown_url"
    assert refused(openai.APIStatusError, create, messages=[{"role": "user", "content": "x" * (17 << 20)}]).status_code == 413


def overload():
    streams = []
    try:
        for _ in range(12):
            wanted = {"model": model, "messages": CHAT, "n": 128, "stream": True}
            streams.append(client.chat.completions.create(extra_body={"ignore_eos": True}, **wanted))
    except openai.RateLimitError as error:
        assert int(error.response.headers["retry-after"]) >= 1 and error.code == "overloaded", error
    else:
        raise AssertionError("1536 sequences at once were not too many")
    finally:
        for stream in streams:
            stream.close()


def leaves():
    """A client that leaves does not keep anything: all that ran ends at once."""
    stream = client.chat.completions.create(model=model, messages=CHAT, stream=True, n=4, extra_body={"ignore_eos": True})
    for _, _chunk in zip(range(8), stream):
        pass
    stream.close()


for check in [models, completions, chat, seeds_and_choices, errors, leaves, overload]:
    check()
    print(check.__name__)
