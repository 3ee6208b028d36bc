"""llama.cpp's greedy continuation of some prompts.

Reads {"model", "prompts": [[token id]], "steps"} as JSON from standard input; prints for each prompt `steps` pairs
[best token, logprob gap to the second best], each after the prompt and the tokens before, as JSON.
"""

import json
import sys
import urllib.request

import xllamacpp

task = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = task["model"]
params.n_ctx = 1024
params.n_parallel = 1
params.warmup = False
params.cpuparams.n_threads = 2
server = xllamacpp.Server(params)


def best_two(prefix):
    body = {
        "prompt": prefix,
        "n_predict": 1,
        "temperature": 0.0,
        "n_probs": 2,
        "cache_prompt": True,
        "post_sampling_probs": False,
    }
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["completion_probabilities"][0]["top_logprobs"]


choices = []
for prompt in task["prompts"]:
    sequence, steps = list(prompt), []
    while len(steps) < task["steps"]:
        first, second = best_two(sequence)[:2]
        steps.append([first["id"], first["logprob"] - second["logprob"]])
        sequence.append(first["id"])
    choices.append(steps)
print(json.dumps(choices))
