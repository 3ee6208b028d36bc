//! Memory, kernels and graphs of the CUDA device on a GPU.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a failure is what a test reports")]

mod gpu;

use lockstep_kernels::{
    KernelError,
    cuda::{DeviceBuffer, Gpu, Graph, KernelCache, Launch, PinnedBuffer, ScratchBuffer, Staging, sources::Source},
};

static SOURCE: Source = Source {
    name: "test.cu",
    text: "#include \"launch.cuh\"
extern \"C\" __global__ void add(uint32_t* values, uint32_t len, uint32_t summand) {
    allow_next();
    wait_for_previous();
    uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < len) values[index] += summand + STEP;
}",
    variants: &[],
};

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_chain_of_overlapping_launches_is_ordered_and_replayed() {
    const LEN: u32 = 1 << 20;
    let gpu = gpu::open();
    let kernel = gpu.kernel(&SOURCE, &["-DSTEP=1".to_owned()], "add").unwrap();
    let values = DeviceBuffer::zeroed(&gpu, LEN as usize * 4).unwrap();
    let chain = || -> Result<(), KernelError> {
        for summand in 0..50 {
            let arguments = [(&values).into(), LEN.into(), u32::into(summand)];
            // SAFETY: the kernel's arguments; it checks the length.
            unsafe { kernel.launch(&gpu, Launch::blocks(LEN / 256, 256), &arguments) }?;
        }
        Ok(())
    };
    chain().unwrap();
    let graph = Graph::record(&gpu, chain).unwrap();
    for _ in 0..3 {
        graph.replay().unwrap();
    }
    assert_eq!(gpu::download::<u32>(&values, LEN as usize), vec![4 * (49 * 50 / 2 + 50); LEN as usize]);
    assert!(gpu.elapsed_ms(|| graph.replay()).unwrap() > 0.0);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_failed_recording_leaves_the_stream_usable() {
    let gpu = gpu::open();
    let failed = Graph::record(&gpu, || Err(KernelError::Device { device: "test".to_owned(), what: "no".to_owned() }));
    assert!(failed.is_err());
    let panicked = || Graph::record::<KernelError>(&gpu, || panic!("while recording"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panicked)).is_err());
    let unrecordable = || DeviceBuffer::zeroed(&gpu, 1 << 20).map(drop);
    assert!(Graph::record(&gpu, unrecordable).is_err(), "memory is taken");
    let values = gpu::upload(&gpu, &[1_u32, 2, 3]);
    assert_eq!(gpu::download::<u32>(&values, 3), [1, 2, 3]);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn copies_are_checked_and_scratch_is_reused() {
    let gpu = gpu::open();
    let mut pinned = PinnedBuffer::zeroed(&gpu, 8).unwrap();
    pinned.bytes_mut().unwrap().copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let buffer = DeviceBuffer::zeroed(&gpu, 7).unwrap();
    buffer.write_pinned(2, &pinned, 2..7).unwrap();
    assert_eq!(gpu::download::<u8>(&buffer, 7), [0, 0, 3, 4, 5, 6, 7]);
    assert!(buffer.write_pinned(2, &pinned, 2..8).is_err() && buffer.write_pinned(0, &pinned, 8..9).is_err());
    assert!(buffer.write(5, &[0_u8; 3]).is_err() && buffer.read(8, &mut [0_u8; 0]).is_err());
    let first = ScratchBuffer::new(&gpu, 10_000).unwrap().pointer();
    let again = ScratchBuffer::new(&gpu, 11_000).unwrap();
    assert_eq!(again.pointer(), first);
    let statistics = gpu.pool_statistics();
    assert_eq!((statistics.num_requests, statistics.num_hits, statistics.high_water_bytes), (2, 1, 16_384));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn what_is_staged_arrives_piece_by_piece() {
    let gpu = gpu::open();
    let mut staging = Staging::new(&gpu);
    // A small one, then one of several pieces with a rest, then one whose unit is larger than a piece.
    for (len, unit) in gpu::cases([(1000, 3), (0, 1), (20_000_000, 20_000_000), (40_000_003, 7)]) {
        let value = |index: usize| (index * 31 % 251) as u8;
        let buffer = staging
            .upload(len, unit, |start, bytes| {
                assert!(start % unit == 0 && (bytes.len() % unit == 0 || start + bytes.len() == len));
                bytes.iter_mut().zip(start..).for_each(|(byte, index)| *byte = value(index));
            })
            .unwrap();
        assert!(
            gpu::download::<u8>(&buffer, len).into_iter().eq((0..len).map(value)),
            "{len} bytes in units of {unit}"
        );
    }
}

/// As where another process holds a GPU's memory: it is neither measured nor chosen, and the error says how much is free.
#[test]
#[ignore = "needs a CUDA GPU"]
fn a_gpu_whose_memory_is_taken_is_refused_with_the_numbers() {
    const LEFT_MIB: usize = 700;
    let gpu = gpu::open();
    let (free, total) = gpu.memory().unwrap();
    let taken = DeviceBuffer::uninit(&gpu, free - (LEFT_MIB << 20)).unwrap();
    let (left, _) = gpu.memory().unwrap();
    let opened = Gpu::open(0, gpu::cache()).unwrap();
    let message = opened.measure().unwrap_err().to_string();
    let numbers = format!("of {} MiB are free, at least 1280 MiB are needed", total >> 20);
    assert!(left >> 20 <= LEFT_MIB && message.starts_with("cuda:0: ") && message.contains(&numbers), "{message}");
    println!("{message}");
    drop(taken);
    assert!(opened.measure().unwrap().memory_bytes > (free / 2) as u64);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn what_cannot_be_had_is_an_error_with_the_numbers() {
    let gpu = gpu::open();
    let message = DeviceBuffer::uninit(&gpu, 1 << 50).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("1125899906842624 bytes") && message.contains("are free"), "{message}");
    let message = Gpu::open(4096, KernelCache::default()).map(|_| ()).unwrap_err().to_string();
    assert!(message.contains("4096"), "{message}");
}
