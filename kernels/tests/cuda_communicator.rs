//! GPUs of several ranks that meet: sums and hand-overs, call by call and recorded, and that nobody waits for a rank that
//! does not come. Ranks are threads here; the end-to-end tests have processes.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod blocks;
#[path = "group/meeting.rs"]
mod meeting;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use blocks::random_matrix;
use lockstep_formats::GgmlType;
use lockstep_kernels::{
    Device, KernelError,
    cpu::CpuDevice,
    cuda::{CudaCommunicator, CudaDevice, CudaTensor, KernelCache},
    group::{Collective, Group, Sum},
    reference,
};
use meeting::Meeting;

type Communicator = Arc<CudaCommunicator>;

/// As long as a rank may notice that another is lost.
const NOTICE: Duration = Duration::from_secs(2);

/// What rank `rank` exchanges bytes through.
fn exchange(meeting: &Meeting, rank: usize) -> impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>, KernelError> {
    move |bytes| Ok(meeting.exchange(rank, bytes))
}

/// Ends waits when it is set.
#[derive(Clone, Default)]
struct End(Arc<AtomicBool>);

impl End {
    fn group(&self, rank: usize, world_size: usize, timeout: Duration) -> Group {
        let ended = Arc::clone(&self.0);
        let end_reason = move || ended.load(Ordering::Relaxed).then(|| "rank 1 is lost".to_owned());
        Group { rank, world_size, timeout, end_reason: Arc::new(end_reason) }
    }
}

/// Runs `body` as each of `world_size` ranks, each with a GPU, after they have met.
fn with_ranks<T: Send>(
    world_size: usize,
    timeout: Duration,
    end: &End,
    body: impl Fn(usize, CudaDevice, Communicator) -> T + Sync,
) -> Vec<T> {
    let meeting = Meeting::new(world_size);
    std::thread::scope(|scope| {
        let run = |rank| {
            let (body, meeting, group) = (&body, &meeting, end.group(rank, world_size, timeout));
            scope.spawn(move || {
                let mut exchange = exchange(meeting, rank);
                let mut device = CudaDevice::new(rank, KernelCache::default()).unwrap();
                let communicator = device.join::<KernelError>(&group, &mut exchange).unwrap();
                body(rank, device, communicator.unwrap())
            })
        };
        let threads: Vec<_> = (0..world_size).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn fill(device: &mut CudaDevice, num_tokens: usize, tensor: &mut CudaTensor, value: impl Fn(usize) -> f32) {
    let set = |values: &mut [f32]| {
        values.iter_mut().enumerate().for_each(|(index, target)| *target = value(index));
        Ok::<_, KernelError>(())
    };
    device.with_host(num_tokens, tensor, set).unwrap();
}

fn values(device: &mut CudaDevice, num_tokens: usize, tensor: &mut CudaTensor) -> Result<Vec<f32>, KernelError> {
    device.with_host(num_tokens, tensor, |values| Ok(values.to_vec()))
}

fn value(rank: usize, index: usize, round: usize) -> f32 {
    ((index * 31 + rank * 7 + round * 13) % 1000) as f32
}

/// Sums of tensors of several sizes, over and over with other values: at first call by call, then recorded, then replayed.
fn check_sums(world_size: usize) {
    const SIZES: [(usize, usize); 8] =
        [(1, 1), (1, 7), (1, 8192), (3, 8192), (5, 576), (64, 8192), (512, 4096), (1, 128)];
    with_ranks(world_size, Duration::from_secs(30), &End::default(), |rank, mut device, communicator| {
        let mut tensors = SIZES.map(|(num_tokens, width)| device.tensor(num_tokens, width).unwrap());
        for round in 0..5 {
            for (tensor, (num_tokens, _)) in tensors.iter_mut().zip(SIZES) {
                fill(&mut device, num_tokens, tensor, |index| value(rank, index, round));
            }
            let sum_all = |device: &mut CudaDevice| {
                tensors.iter_mut().zip(SIZES).try_for_each(|(tensor, (num_tokens, _))| {
                    device.collective(num_tokens, tensor, Collective::AllReduce, &communicator)
                })
            };
            device.step::<_, KernelError>(sum_all).unwrap();
            for (tensor, (num_tokens, width)) in tensors.iter_mut().zip(SIZES) {
                // Whole numbers: exact in any order.
                let expected: Vec<f32> = (0..num_tokens * width)
                    .map(|index| (0..world_size).map(|rank| value(rank, index, round)).sum())
                    .collect();
                assert!(values(&mut device, num_tokens, tensor).unwrap() == expected, "rank {rank}, round {round}");
            }
        }
    });
}

#[test]
#[ignore = "needs 2 CUDA GPUs"]
fn cuda_two_gpus_add_up() {
    check_sums(2);
}

#[test]
#[ignore = "needs 4 CUDA GPUs"]
fn cuda_four_gpus_add_up() {
    check_sums(4);
}

/// Sums of products that are so long that they travel in f16, for both ways to multiply batches.
fn check_long_sums(world_size: usize) {
    const COLUMNS: usize = 256;
    for (num_tokens, rows) in [(512, 8192), (1100, 4096)] {
        let results =
            with_ranks(world_size, Duration::from_secs(30), &End::default(), |rank, mut device, communicator| {
                let weight = device.linear(vec![random_matrix(GgmlType::Q8_0, rows, COLUMNS, rank as u64)]).unwrap();
                let mut input = device.tensor(num_tokens, COLUMNS).unwrap();
                fill(&mut device, num_tokens, &mut input, |index| (value(rank, index, 1) * 0.01).sin());
                let mut hidden = device.tensor(num_tokens, rows).unwrap();
                device.matmul_add::<KernelError>(num_tokens, &weight, &input, &mut hidden, Sum::Own).unwrap();
                let own = values(&mut device, num_tokens, &mut hidden).unwrap();
                fill(&mut device, num_tokens, &mut hidden, |index| (index % 1000) as f32);
                let sum = Sum::Devices(&communicator);
                device.matmul_add::<KernelError>(num_tokens, &weight, &input, &mut hidden, sum).unwrap();
                (own, values(&mut device, num_tokens, &mut hidden).unwrap())
            });
        for (index, sum) in results[0].1.iter().enumerate() {
            assert!(results.iter().all(|(_, other)| other[index].to_bits() == sum.to_bits()), "value {index}");
            let exact: f64 = results.iter().map(|(own, _)| f64::from(own[index])).sum::<f64>() + (index % 1000) as f64;
            let magnitude: f32 = results.iter().map(|(own, _)| own[index].abs()).sum();
            // Each product and each sum on the way is rounded to 11 bits, the residual stream to 24.
            let bound = magnitude * world_size as f32 / 2048.0 + 1e-3;
            assert!((f64::from(*sum) - exact).abs() < f64::from(bound), "value {index}: {sum}, expected {exact}");
        }
    }
}

#[test]
#[ignore = "needs 2 CUDA GPUs"]
fn cuda_two_gpus_add_long_sums_up() {
    check_long_sums(2);
}

#[test]
#[ignore = "needs 4 CUDA GPUs"]
fn cuda_four_gpus_add_long_sums_up() {
    check_long_sums(4);
}

#[test]
#[ignore = "needs 2 CUDA GPUs"]
fn cuda_two_gpus_get_the_same_bits() {
    let sums = with_ranks(2, Duration::from_secs(30), &End::default(), |rank, mut device, communicator| {
        let mut tensor = device.tensor(100, 8192).unwrap();
        fill(&mut device, 100, &mut tensor, |index| (value(rank, index, 3) * 0.1).sin());
        device.collective(100, &mut tensor, Collective::AllReduce, &communicator).unwrap();
        values(&mut device, 100, &mut tensor).unwrap()
    });
    assert!(sums[0] == sums[1]);
}

/// Sums that a norm follows, of few rows in the same launch: call by call, recorded and replayed.
#[test]
#[ignore = "needs 2 CUDA GPUs"]
fn cuda_two_gpus_norm_what_they_add_up() {
    const SIZES: [(usize, usize); 5] = [(1, 576), (1, 4096), (2, 8192), (5, 4096), (100, 8192)];
    with_ranks(2, Duration::from_secs(30), &End::default(), |rank, mut device, communicator| {
        let tensor = |(num_tokens, width)| device.tensor(num_tokens, width).unwrap();
        let (mut sums, mut normed) = (SIZES.map(tensor), SIZES.map(tensor));
        let weights = SIZES.map(|(_, width)| (0..width).map(|index| value(2, index, 0) / 500.0).collect::<Vec<_>>());
        let vectors = weights.clone().map(|weights| device.vector(&weights).unwrap());
        for round in 0..4 {
            for (tensor, (num_tokens, _)) in sums.iter_mut().zip(SIZES) {
                fill(&mut device, num_tokens, tensor, |index| value(rank, index, round));
            }
            let sum_and_norm = |device: &mut CudaDevice| {
                for (number, (num_tokens, _)) in SIZES.into_iter().enumerate() {
                    device.collective(num_tokens, &mut sums[number], Collective::AllReduce, &communicator)?;
                    device.rms_norm(num_tokens, &sums[number], &vectors[number], 1e-5, &mut normed[number])?;
                }
                Ok(())
            };
            device.step::<_, KernelError>(sum_and_norm).unwrap();
            for (number, (num_tokens, width)) in SIZES.into_iter().enumerate() {
                let sum = |index| value(0, index, round) + value(1, index, round);
                let expected: Vec<f32> = (0..num_tokens * width).map(sum).collect();
                let name = format!("{num_tokens} x {width}, round {round}");
                assert!(values(&mut device, num_tokens, &mut sums[number]).unwrap() == expected, "sums of {name}");
                let got = values(&mut device, num_tokens, &mut normed[number]).unwrap();
                for (got, want) in got.iter().zip(reference::rms_norm::rms_norm(&expected, &weights[number], 1e-5)) {
                    assert!((f64::from(*got) - want).abs() <= 1e-6 * want.abs().max(1e-3), "{name}: {got} {want}");
                }
            }
        }
    });
}

/// Rows go from rank to rank, each adds to what it sends on; several steps are under way at once.
#[test]
#[ignore = "needs 2 CUDA GPUs"]
fn cuda_two_gpus_hand_rows_over() {
    const SIZES: [usize; 4] = [1, 7, 64, 2048];
    const CALLS: usize = 8;
    with_ranks(2, Duration::from_secs(30), &End::default(), |rank, mut device, communicator| {
        let collective = [Collective::Send { peer: 1 }, Collective::Receive { peer: 0 }][rank];
        let mut tensors: Vec<_> = (0..CALLS).map(|_| device.tensor(2048, 4096).unwrap()).collect();
        for round in 0..12 {
            let num_tokens = SIZES[round % SIZES.len()];
            if rank == 0 {
                for (number, tensor) in tensors.iter_mut().enumerate() {
                    fill(&mut device, num_tokens, tensor, |index| value(number, index, round));
                }
            }
            let hand_over = |device: &mut CudaDevice| {
                tensors
                    .iter_mut()
                    .try_for_each(|tensor| device.collective(num_tokens, tensor, collective, &communicator))
            };
            device.step::<_, KernelError>(hand_over).unwrap();
            if rank == 1 {
                for (number, tensor) in tensors.iter_mut().enumerate() {
                    let expected: Vec<f32> = (0..num_tokens * 4096).map(|index| value(number, index, round)).collect();
                    assert!(values(&mut device, num_tokens, tensor).unwrap() == expected, "round {round}");
                }
            }
        }
        // A sender's work may still be under way: closing waits for it.
    });
}

/// A step of so many sums.
fn sum_often(
    device: &mut CudaDevice,
    tensor: &mut CudaTensor,
    num_sums: usize,
    communicator: &Communicator,
) -> Result<Vec<f32>, KernelError> {
    device.step(|device| {
        (0..num_sums).try_for_each(|_| device.collective(1, tensor, Collective::AllReduce, communicator))
    })?;
    values(device, 1, tensor)
}

/// Rank 1 stays away from one step on, as a stopped process does; rank 0 is told so, or loses patience.
fn check_loss(num_sums_of_last: usize, timeout: Duration, is_told: bool) {
    let end = End::default();
    let is_over = AtomicBool::new(false);
    with_ranks(2, timeout, &end, |rank, mut device, communicator| {
        let mut tensor = device.tensor(1, 8192).unwrap();
        for _ in 0..3 {
            sum_often(&mut device, &mut tensor, 10, &communicator).unwrap();
        }
        if rank == 1 {
            let start = Instant::now();
            while !is_over.load(Ordering::Relaxed) && start.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(10));
            }
            return;
        }
        if is_told {
            let end = end.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(300));
                end.0.store(true, Ordering::Relaxed);
            });
        }
        let start = Instant::now();
        let error = sum_often(&mut device, &mut tensor, num_sums_of_last, &communicator).unwrap_err().to_string();
        println!("{num_sums_of_last} sums: {error} after {:?}", start.elapsed());
        assert!(start.elapsed() < NOTICE, "{:?}", start.elapsed());
        assert!(error.contains(if is_told { "rank 1 is lost" } else { "did not come within" }), "{error}");
        // Nor does it do anything afterwards, nor hang when it is closed.
        sum_often(&mut device, &mut tensor, 10, &communicator).unwrap_err();
        let start = Instant::now();
        drop((tensor, device, communicator));
        println!("closed after {:?}", start.elapsed());
        assert!(start.elapsed() < NOTICE, "closing took {:?}", start.elapsed());
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
#[ignore = "needs 2 CUDA GPUs"]
fn cuda_two_gpus_do_not_wait_for_a_lost_rank() {
    const LONG: Duration = Duration::from_secs(30);
    // In a replayed step, in steps call by call, short and long, and without being told.
    check_loss(10, LONG, true);
    check_loss(11, LONG, true);
    check_loss(3000, LONG, true);
    check_loss(10, Duration::from_secs(1), false);
    // GPUs that lost a rank can meet others again.
    check_sums(2);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn cuda_a_gpu_meets_neither_a_processor_nor_itself() {
    let end = End::default();
    let group = |rank| end.group(rank, 2, Duration::from_secs(30));
    for is_cpu in [true, false] {
        let meeting = &Meeting::new(2);
        std::thread::scope(|scope| {
            let group_1 = group(1);
            let other = scope.spawn(move || {
                let mut exchange = exchange(meeting, 1);
                if is_cpu {
                    CpuDevice::new(1).unwrap().join::<KernelError>(&group_1, &mut exchange).unwrap().is_none()
                } else {
                    let mut device = CudaDevice::new(0, KernelCache::default()).unwrap();
                    device.join::<KernelError>(&group_1, &mut exchange).unwrap().is_none()
                }
            });
            let mut device = CudaDevice::new(0, KernelCache::default()).unwrap();
            assert!(device.join::<KernelError>(&group(0), &mut exchange(meeting, 0)).unwrap().is_none());
            assert!(other.join().unwrap());
        });
    }
}

/// A rank that is lost between its offer and the meeting.
#[test]
#[ignore = "needs 2 CUDA GPUs"]
fn cuda_two_gpus_do_not_wait_for_a_rank_that_does_not_join() {
    let end = End::default();
    let group = |rank| end.group(rank, 2, Duration::from_secs(2));
    let meeting = &Meeting::new(2);
    std::thread::scope(|scope| {
        let group_1 = group(1);
        let other = scope.spawn(move || {
            let mut device = CudaDevice::new(1, KernelCache::default()).unwrap();
            let mut lost = |bytes: &[u8]| {
                meeting.exchange(1, bytes);
                meeting.exchange(1, &[0]);
                Err(KernelError::Device { device: "test".to_owned(), what: "lost".to_owned() })
            };
            device.join::<KernelError>(&group_1, &mut lost).map(drop).unwrap_err();
        });
        let mut device = CudaDevice::new(0, KernelCache::default()).unwrap();
        let start = Instant::now();
        let joined = device.join::<KernelError>(&group(0), &mut exchange(meeting, 0)).unwrap();
        println!("not joined after {:?}", start.elapsed());
        assert!(joined.is_none() && start.elapsed() < Duration::from_secs(10));
        other.join().unwrap();
    });
}

/// Prints what a sum takes within a recorded step.
fn time_sums(world_size: usize) {
    const NUM_SUMS: usize = 64;
    for len in [2048, 4096, 8192, 16_384, 65_536, 1 << 20, 1 << 23, 1 << 25] {
        let times = with_ranks(world_size, Duration::from_secs(30), &End::default(), |_, mut device, communicator| {
            let num_tokens = len / 2048;
            let mut tensor = device.tensor(num_tokens, 2048).unwrap();
            let mut step = |device: &mut CudaDevice| {
                let start = Instant::now();
                let sum = |device: &mut CudaDevice| {
                    (0..NUM_SUMS).try_for_each(|_| {
                        device.collective(num_tokens, &mut tensor, Collective::AllReduce, &communicator)
                    })
                };
                device.step::<_, KernelError>(sum).unwrap();
                device.gpu().synchronize().unwrap();
                start.elapsed()
            };
            let first = step(&mut device);
            let recorded = step(&mut device);
            let best = (0..20).map(|_| step(&mut device)).min().unwrap();
            (first, recorded, best)
        });
        let (first, recorded, best) = times[0];
        println!(
            "{world_size} GPUs, {} KiB: {:.2} us a sum; {NUM_SUMS} of them {first:?} at first, {recorded:?} recorded",
            len * 4 / 1024,
            best.as_secs_f64() * 1e6 / NUM_SUMS as f64
        );
    }
}

#[test]
#[ignore = "needs 2 CUDA GPUs"]
fn cuda_two_gpus_take_so_long() {
    time_sums(2);
}

#[test]
#[ignore = "needs 4 CUDA GPUs"]
fn cuda_four_gpus_take_so_long() {
    time_sums(4);
}
