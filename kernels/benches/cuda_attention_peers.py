"""What torch's scaled_dot_product_attention does on this GPU, for the cases of cuda_attention.rs: the median over
replays of a graph, which goes through several caches where one is small."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD_DIM, ROTATED_BYTES, REPEATS = 128, 1 << 30, 9
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def milliseconds(backend, num_heads, num_key_value_heads, num_sequences, num_keys, num_tokens):
    def tensor(*sizes):
        return torch.randn(*sizes, HEAD_DIM, dtype=torch.bfloat16, device="cuda")

    num_layers = num_sequences * num_keys * num_key_value_heads * HEAD_DIM * 4
    num_layers = max(1, min(32, ROTATED_BYTES // num_layers))
    query = tensor(num_sequences, num_heads, num_tokens)
    layers = [[tensor(num_sequences, num_key_value_heads, num_keys) for _ in "kv"] for _ in range(num_layers)]
    is_causal, enable_gqa = num_tokens > 1, num_heads != num_key_value_heads

    def run():
        with sdpa_kernel(backend):
            for key, value in layers:
                torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=is_causal, enable_gqa=enable_gqa
                )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        times = []
        for _ in range(REPEATS):
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times)[REPEATS // 2] / num_layers


def main():
    print(torch.cuda.get_device_name(0), "torch", torch.__version__, "cudnn", torch.backends.cudnn.version())
    for name, backend in BACKENDS.items():
        for heads, keys in [(32, 4096), (8, 4096), (32, 16384), (8, 16384)]:
            time = milliseconds(backend, 32, heads, 1, keys, keys)
            rate = 4 * 32 * HEAD_DIM * keys * keys / 2 / time / 1e9
            print(f"{name} prefill 32/{heads} {keys}: {time:.3f} ms, {rate:.0f} TFLOP/s")
        for sequences, keys in [(64, 8192), (8, 8192), (1, 65536), (1, 8192), (128, 512), (1, 2048), (1, 512)]:
            time = milliseconds(backend, 32, 8, sequences, keys, 1)
            rate = sequences * keys * 8 * HEAD_DIM * 4 / time / 1e6
            print(f"{name} decode {sequences} x {keys}: {time * 1e3:.1f} us, {rate:.0f} GB/s")


main()
