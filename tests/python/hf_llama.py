"""A random Llama written by Hugging Face transformers, and what transformers makes of it.

usage: hf_llama.py FOLDER float32|bfloat16

Writes the checkpoint to FOLDER, its weights in that type. Prints as JSON `passages` (token ids, of which the first
`num_prompt_tokens` are a random prompt and the rest the greedy continuation), for each step of the continuation the
`top` 20 [token id, logprob] before it, computed in float32, and `rounding`: mean and largest difference of those
logprobs when transformers itself computes in 16 bits (bfloat16 for weights of that type, else float16).
"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
except ImportError as error:
    sys.exit(f"{sys.executable} has no {error.name}: torch and transformers are needed")

folder, type_name = sys.argv[1:]
weight_type = getattr(torch, type_name)
half_type = torch.bfloat16 if weight_type == torch.bfloat16 else torch.float16
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, TOP, STEPS = 1009, 20, 40
PROMPT_TOKENS = [1, 2, 5, 9, 33, 130, 300]

transformers.logging.set_verbosity_error()
torch.manual_seed(7)
torch.backends.cuda.matmul.allow_tf32 = False
config = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=320,
    intermediate_size=872,
    num_hidden_layers=3,
    num_attention_heads=10,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    # Sums of some hundred random terms keep their size; logits spread as those of trained models do.
    initializer_range=0.06,
    bos_token_id=1,
    eos_token_id=2,
)
model = transformers.LlamaForCausalLM(config).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(0.5 + torch.rand_like(parameter))
        elif "lm_head" in name:
            parameter.mul_(3)
model.to(weight_type).save_pretrained(folder)
tokenizer = Tokenizer(models.BPE({f"<{index}>": index for index in range(VOCABULARY)}, []))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
tokenizer.save(f"{folder}/tokenizer.json")



def load(dtype):
    # Not by `to`, which would round the rotary frequencies as well.
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)


model = load(torch.float32)
generator = torch.Generator().manual_seed(11)


@torch.no_grad()
def logprobs(model, ids):
    logits = model(torch.tensor([ids], device=device)).logits[0].float()
    return torch.log_softmax(logits, dim=-1).cpu()


passages = []
for num_prompt_tokens in PROMPT_TOKENS:
    ids = torch.randint(3, VOCABULARY, (num_prompt_tokens,), generator=generator).tolist()
    for _ in range(STEPS):
        ids.append(int(logprobs(model, ids)[-1].argmax()))
    exact = logprobs(model, ids)[num_prompt_tokens - 1 : -1].topk(TOP)
    steps = [list(zip(*step)) for step in zip(exact.indices.tolist(), exact.values.tolist())]
    passages.append({"ids": ids, "num_prompt_tokens": num_prompt_tokens, "top": steps})

half = load(half_type)
differences = []
for passage in passages:
    rounded = logprobs(half, passage["ids"])[passage["num_prompt_tokens"] - 1 : -1]
    for row, step in zip(rounded, passage["top"]):
        differences += [abs(float(row[token_id]) - logprob) for token_id, logprob in step]
rounding = {"mean": sum(differences) / len(differences), "max": max(differences)}
print(json.dumps({"passages": passages, "rounding": rounding, "device": device, "transformers": transformers.__version__}))
