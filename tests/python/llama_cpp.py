"""llama.cpp's greedy choice after every prefix of some token sequences.

Reads {"model", "sequences": [[token id]], "first"} as JSON from standard input; for each sequence and each n from
`first` to its length prints [best token, logprob gap to the second best] of the prefix of n tokens, as JSON.
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
for sequence in task["sequences"]:
    steps = []
    for length in range(task["first"], len(sequence) + 1):
        first, second = best_two(sequence[:length])[:2]
        steps.append([first["id"], first["logprob"] - second["logprob"]])
    choices.append(steps)
print(json.dumps(choices))
