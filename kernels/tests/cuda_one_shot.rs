//! Sums over the GPUs of a host: the same bits as sums on the host in the order of the ranks, whatever changes between
//! operations; and their end when a rank never comes.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod gpu;
mod group;
mod tiles;

use std::{
    convert::Infallible,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use group::{Meeting, Member};
use half::bf16;
use lockstep_kernels::{
    KernelError,
    cuda::{
        Activations, Argument, DeviceBuffer, Forms, Gpu, Graph, HalfType, KernelCache, Launch, OneShot,
        rms_norm::{RmsNormCall, RowShape},
        sources::Source,
    },
    group::OFFER_BYTES,
    reference,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tiles::tiles_of;

/// Terms that differ by rank, operation, step and place; the first rank's are added to the sums before.
static SOURCE: Source = Source {
    name: "terms.cu",
    text: "#include \"launch.cuh\"
extern \"C\" __global__ void make_terms(float* terms, uint32_t len, uint32_t rank, uint32_t operation, const uint32_t* step) {
    allow_next();
    wait_for_previous();
    uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= len) return;
    uint32_t hash = index * 0x9e3779b1u ^ rank * 0x85ebca77u ^ operation * 0xc2b2ae3du ^ *step * 0x27d4eb2fu;
    hash = (hash ^ hash >> 15) * 0x2c1b3c6du;
    hash = (hash ^ hash >> 12) * 0x297a2d39u;
    float term = (float)((hash ^ hash >> 15) >> 8) * 0x1p-24f - 0.5f;
    terms[index] = rank == 0 ? terms[index] + term : term;
}
extern \"C\" __global__ void next_step(uint32_t* step) {
    allow_next();
    wait_for_previous();
    if (threadIdx.x == 0) *step += 1 + VARIANT;
}",
    variants: &[],
};

fn term(index: usize, rank: usize, operation: usize, step: u32) -> f32 {
    let mut hash = (index as u32).wrapping_mul(0x9e37_79b1)
        ^ (rank as u32).wrapping_mul(0x85eb_ca77)
        ^ (operation as u32).wrapping_mul(0xc2b2_ae3d)
        ^ step.wrapping_mul(0x27d4_eb2f);
    hash = (hash ^ (hash >> 15)).wrapping_mul(0x2c1b_3c6d);
    hash = (hash ^ (hash >> 12)).wrapping_mul(0x297a_2d39);
    ((hash ^ (hash >> 15)) >> 8) as f32 * 2.0_f32.powi(-24) - 0.5
}

/// What `len` values that start at 0 are after `num_steps` sums that were added to them.
fn expected(len: usize, world_size: usize, operation: usize, num_steps: u32) -> Vec<u32> {
    let value = |index| {
        (0..num_steps).fold(0.0_f32, |value, step| {
            (0..world_size).fold(value, |sum, rank| sum + term(index, rank, operation, step))
        })
    };
    (0..len).map(|index| value(index).to_bits()).collect()
}

/// Replays a graph of sums of these lengths and returns the bits of what they came to. `pause` is called before each.
fn replay_sums(
    gpu: &Arc<Gpu>,
    ranks: &OneShot,
    rank: usize,
    lens: &[usize],
    num_steps: u32,
    pause: impl Fn(u32),
) -> Vec<Vec<u32>> {
    let variant = ["-DVARIANT=0".to_owned()];
    let make_terms = gpu.kernel(&SOURCE, &variant, "make_terms").unwrap();
    let next_step = gpu.kernel(&SOURCE, &variant, "next_step").unwrap();
    let step = DeviceBuffer::zeroed(gpu, 4).unwrap();
    let calls: Vec<_> = lens.iter().map(|len| (*len, DeviceBuffer::zeroed(gpu, len * 4).unwrap())).collect();
    let launch = || -> Result<(), KernelError> {
        for (operation, (len, values)) in calls.iter().enumerate() {
            let numbers = [*len, rank, operation].map(|number| number as u32);
            let [len_word, rank, operation] = numbers.map(Argument::U32);
            let arguments = [values.into(), len_word, rank, operation, (&step).into()];
            // SAFETY: the kernel's arguments; it checks the length.
            unsafe { make_terms.launch(gpu, Launch::blocks(len.div_ceil(256) as u32, 256), &arguments) }?;
            ranks.all_reduce(*len, values)?;
        }
        // SAFETY: the kernel's arguments.
        unsafe { next_step.launch(gpu, Launch::blocks(1, 32), &[(&step).into()]) }
    };
    pause(0);
    launch().unwrap();
    let graph = Graph::record(gpu, launch).unwrap();
    for step in 1..num_steps {
        pause(step);
        graph.replay().unwrap();
    }
    calls.iter().map(|(len, values)| gpu::download(values, *len)).collect()
}

fn sums_are_those_of_the_host(world_size: usize, lens: &[usize], num_steps: u32) {
    let results = group::run(world_size, |Member { gpu, ranks, rank, .. }| {
        let lens: Vec<usize> = lens.iter().map(|len| if *len == 0 { ranks.max_len() } else { *len }).collect();
        // Ranks that come late in turn.
        let pause = |step: u32| {
            if step % 97 == 31 * rank as u32 {
                thread::sleep(Duration::from_micros(u64::from(step) % 7 * 300));
            }
        };
        (replay_sums(&gpu, &ranks, rank, &lens, num_steps, pause), lens)
    });
    for (operation, len) in results[0].1.iter().enumerate() {
        let want = expected(*len, world_size, operation, num_steps);
        for (rank, (got, _)) in results.iter().enumerate() {
            let wrong = got[operation].iter().zip(&want).filter(|(got, want)| got != want).count();
            assert_eq!(wrong, 0, "wrong values of {len} on rank {rank}, operation {operation}");
        }
    }
}

/// Small and odd lengths beside the largest one, which is written 0.
const LENS: [usize; 10] = [4096, 1, 5, 127, 16384, 129, 4099, 3, 8192, 1026];

#[test]
#[ignore = "needs two CUDA GPUs"]
fn two_gpus_sum_what_changes_at_every_step() {
    sums_are_those_of_the_host(2, &LENS, 3000);
    sums_are_those_of_the_host(2, &[0, 4096, 131_071, 0], 100);
}

#[test]
#[ignore = "needs four CUDA GPUs"]
fn four_gpus_sum_what_changes_at_every_step() {
    sums_are_those_of_the_host(4, &LENS, 3000);
    sums_are_those_of_the_host(4, &[0, 4096, 65_533, 0], 100);
    sums_are_those_of_the_host(3, &[0, 4096, 65_533, 2], 100);
}

/// A sum and its norm: in clusters of so many blocks, or 0, of as many as the launcher chooses.
struct NormCase {
    num_tokens: usize,
    width: usize,
    cluster: usize,
    /// `[width]`, and of each rank `[num_tokens, width]`.
    weight: Vec<f32>,
    shares: Vec<Vec<f32>>,
}

/// What one rank makes of it.
struct Normed {
    hidden: Vec<f32>,
    values: Vec<f32>,
    halves: Vec<u16>,
    tiles: Option<Vec<u8>>,
}

impl NormCase {
    fn all(world_size: usize) -> Vec<Self> {
        let seed = rand::rng().random();
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let mut cases = Vec::new();
        for width in [4, 32, 96, 576, 1000, 2048, 4096, 5120, 8192, 16384] {
            for cluster in [0, 1, 2, 4, 8] {
                let num_tokens = random.random_range(1..5);
                let mut values = |len: usize, limit: f32| -> Vec<f32> {
                    (0..len).map(|_| random.random_range(-limit..limit)).collect()
                };
                let weight = values(width, 2.0);
                let shares = (0..world_size).map(|_| values(num_tokens * width, 1.0)).collect();
                cases.push(Self { num_tokens, width, cluster, weight, shares });
            }
        }
        cases
    }

    fn run(&self, Member { gpu, ranks, rank, .. }: &Member<'_>) -> Normed {
        let Self { num_tokens, width, cluster, .. } = *self;
        let len = num_tokens * width;
        let forms = Forms { tiles: width % 32 == 0, halves: Some(HalfType::BF16), values: true };
        let output = Activations::zeroed(gpu, num_tokens, width, forms).unwrap();
        let hidden = Arc::new(gpu::upload(gpu, &self.shares[*rank]));
        let input = Arc::clone(&hidden);
        let weight = Arc::new(gpu::upload(gpu, &self.weight));
        let norm = RmsNormCall { num_tokens, input, weight, epsilon: 1e-5, output: output.clone() };
        if cluster == 0 {
            assert!(ranks.takes_norm(&norm));
            ranks.all_reduce_norm(&norm).unwrap();
        } else {
            ranks.all_reduce_norm_in(RowShape::new(gpu, width, cluster).unwrap(), &norm).unwrap();
        }
        Normed {
            hidden: gpu::download(&hidden, len),
            values: gpu::download(output.values.as_ref().unwrap(), len),
            halves: gpu::download(&output.halves.as_ref().unwrap().1, len),
            tiles: output.tiles.map(|tiles| gpu::download(&tiles, tiles.num_bytes())),
        }
    }

    fn check(&self, results: &[Normed]) {
        let Self { width, cluster, .. } = *self;
        let name = format!("width {width}, cluster {cluster}");
        let Normed { hidden, values, .. } = &results[0];
        for (index, got) in hidden.iter().enumerate() {
            let sum = self.shares.iter().map(|share| share[index]).reduce(|sum, term| sum + term).unwrap();
            assert_eq!(got.to_bits(), sum.to_bits(), "{name}, value {index}");
        }
        for (got, want) in values.iter().zip(reference::rms_norm::rms_norm(hidden, &self.weight, 1e-5)) {
            assert!((f64::from(*got) - want).abs() <= 1e-6 * want.abs().max(1e-3), "{name}: {got} {want}");
        }
        for result in results {
            assert!(result.hidden == *hidden && result.values == *values, "ranks differ: {name}");
            for (half, value) in result.halves.iter().zip(values) {
                assert_eq!(*half, bf16::from_f32(*value).to_bits(), "{name}");
            }
            assert!(result.tiles.as_ref().is_none_or(|tiles| *tiles == tiles_of(values, width)), "tiles: {name}");
        }
    }
}

fn norms_follow_sums(world_size: usize) {
    let cases = NormCase::all(world_size);
    let mut ranks: Vec<_> =
        group::run(world_size, |member| cases.iter().map(|case| case.run(&member)).collect::<Vec<_>>())
            .into_iter()
            .map(Vec::into_iter)
            .collect();
    for case in &cases {
        let results: Vec<_> = ranks.iter_mut().map(|results| results.next().unwrap()).collect();
        case.check(&results);
    }
}

#[test]
#[ignore = "needs two CUDA GPUs"]
fn two_gpus_norm_what_they_sum() {
    norms_follow_sums(2);
}

#[test]
#[ignore = "needs four CUDA GPUs"]
fn four_gpus_norm_what_they_sum() {
    norms_follow_sums(4);
}

/// What the driver does for one GPU must not wait for another one that waits for this one.
#[test]
#[ignore = "needs two CUDA GPUs"]
fn two_gpus_sum_while_memory_and_kernels_come_and_go() {
    const LEN: usize = 4096;
    let took = group::run(2, |Member { gpu, ranks, rank, .. }| {
        let start = Instant::now();
        for round in 0..12 {
            thread::sleep(Duration::from_millis(5 * ((round + rank as u64) % 3)));
            let values = gpu::upload(&gpu, &[1.5_f32; LEN]);
            ranks.all_reduce(LEN, &values).unwrap();
            let memory = DeviceBuffer::zeroed(&gpu, 32 << 20).unwrap();
            gpu.kernel(&SOURCE, &[format!("-DVARIANT={round}")], "next_step").unwrap();
            drop(memory);
            ranks.all_reduce(LEN, &values).unwrap();
            assert_eq!(gpu::download::<f32>(&values, LEN), [6.0; LEN]);
        }
        assert!(!ranks.is_aborted());
        start.elapsed()
    });
    println!("12 rounds in {took:?}");
}

#[test]
#[ignore = "needs two CUDA GPUs"]
fn two_gpus_abort_ends_the_wait_for_a_rank_that_never_comes() {
    const NUM_SUMS: usize = 2000;
    const LEN: usize = 4096;
    let abort_in = |ranks: &Arc<OneShot>, milliseconds| {
        let ranks = Arc::clone(ranks);
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(milliseconds));
            ranks.abort();
            Instant::now()
        })
    };
    group::run(2, |Member { gpu, ranks, rank, meeting }| {
        let values = gpu::upload(&gpu, &[1.0_f32; LEN]);
        ranks.all_reduce(LEN, &values).unwrap();
        let graph = Graph::record(&gpu, || (0..NUM_SUMS).try_for_each(|_| ranks.all_reduce(LEN, &values))).unwrap();
        gpu.synchronize().unwrap();
        if rank == 0 {
            graph.replay().unwrap();
            let aborting = abort_in(&ranks, 300);
            gpu.synchronize().unwrap();
            let took = aborting.join().unwrap().elapsed();
            println!("{NUM_SUMS} sums ended {took:?} after the abort");
            assert!(took < Duration::from_millis(500), "{took:?}");
            assert!(ranks.all_reduce(LEN, &values).unwrap_err().to_string().contains("aborted"));
        }
        meeting.wait();
        if rank == 1 {
            // What was sent before the abort is a sum; what was launched behind it has sent nothing.
            ranks.all_reduce(LEN, &values).unwrap();
            assert_eq!(gpu::download::<f32>(&values, LEN), [4.0; LEN]);
            ranks.all_reduce(LEN, &values).unwrap();
            let aborting = abort_in(&ranks, 200);
            gpu.synchronize().unwrap();
            let ended = Instant::now();
            assert!(ended > aborting.join().unwrap(), "a sum with an aborted rank");
        }
        meeting.wait();
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn ranks_that_cannot_have_it_agree_on_none() {
    let meeting = Meeting::new(2);
    thread::scope(|scope| {
        for rank in 0..2 {
            let meeting = &meeting;
            scope.spawn(move || {
                let gpu = gpu::open();
                let mut exchange = |message: &[u8]| Ok::<_, Infallible>(meeting.exchange(rank, message));
                assert!(OneShot::join(&gpu, rank, 2, &mut exchange).unwrap().is_none(), "both are on one GPU");
                // A rank that has no memory to offer, and one alone.
                let refusal = [&b"\x02\x09no memory"[..], &[0; OFFER_BYTES - 11]].concat();
                let mut exchange = |message: &[u8]| {
                    Ok::<_, Infallible>(meeting.exchange(rank, if rank == 0 { message } else { &refusal }))
                };
                assert!(OneShot::join(&gpu, rank, 2, &mut exchange).unwrap().is_none());
                assert!(OneShot::join(&gpu, 0, 1, &mut exchange).unwrap().is_none());
                let mut broken = |_: &[u8]| Err("the link broke");
                assert_eq!(OneShot::join(&gpu, rank, 2, &mut broken).map(|_| ()), Err("the link broke"));
            });
        }
    });
}

/// Address of rank 0, and the number of a process that a test starts.
const ADDRESS: &str = "LOCKSTEP_TEST_ADDRESS";
const RANK: &str = "LOCKSTEP_TEST_RANK";
const PROCESS_LENS: [usize; 4] = [4096, 3, 16384, 129];
const PROCESS_STEPS: u32 = 500;

/// One rank in a process of its own. Rank 0 runs in the test's process and passes the messages of all others on.
struct ProcessRank {
    rank: usize,
    /// Its GPU, as it sees them.
    ordinal: usize,
    /// To all others, or of others to rank 0.
    links: Vec<TcpStream>,
    children: Vec<Child>,
}

impl ProcessRank {
    /// Starts the other ranks: this test again, in other processes, which see all GPUs or their own alone. There it is
    /// one of those.
    fn start(world_size: usize, test: &str, sees_all: bool) -> Self {
        if let (Ok(address), Ok(rank)) = (std::env::var(ADDRESS), std::env::var(RANK)) {
            let mut link = TcpStream::connect(address).unwrap();
            send(&mut link, rank.as_bytes()).unwrap();
            // None is left behind by a test that failed.
            thread::spawn(|| {
                thread::sleep(Duration::from_secs(90));
                std::process::exit(1);
            });
            let rank = rank.parse().unwrap();
            return Self { rank, ordinal: if sees_all { rank } else { 0 }, links: vec![link], children: Vec::new() };
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let child = |rank: usize| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            if !sees_all {
                command.env("CUDA_VISIBLE_DEVICES", rank.to_string());
            }
            command
                .args(["--ignored", "--exact", "--nocapture", test])
                .env(ADDRESS, listener.local_addr().unwrap().to_string())
                .env(RANK, rank.to_string())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        let children = (1..world_size).map(child).collect();
        let mut links: Vec<_> = (1..world_size)
            .map(|_| {
                let mut link = listener.accept().unwrap().0;
                link.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                let rank = String::from_utf8(receive(&mut link).unwrap()).unwrap();
                (rank.parse::<usize>().unwrap(), link)
            })
            .collect();
        links.sort_by_key(|(rank, _)| *rank);
        Self { rank: 0, ordinal: 0, links: links.into_iter().map(|(_, link)| link).collect(), children }
    }

    fn exchange(&mut self, world_size: usize, message: &[u8]) -> std::io::Result<Vec<Vec<u8>>> {
        if self.rank > 0 {
            send(&mut self.links[0], message)?;
            return (0..world_size).map(|_| receive(&mut self.links[0])).collect();
        }
        let mut messages = vec![message.to_vec()];
        messages.extend(self.links.iter_mut().map(receive).collect::<Result<Vec<_>, _>>()?);
        for link in &mut self.links {
            messages.iter().try_for_each(|message| send(link, message))?;
        }
        Ok(messages)
    }

    fn join(&mut self, world_size: usize) -> (Arc<Gpu>, OneShot) {
        let gpu = Gpu::open(self.ordinal, KernelCache::default()).unwrap();
        let rank = self.rank;
        let ranks = OneShot::join(&gpu, rank, world_size, &mut |message| self.exchange(world_size, message)).unwrap();
        assert!(ranks.is_some(), "memory of other processes cannot be opened");
        (gpu, ranks.unwrap())
    }
}

fn send(link: &mut TcpStream, message: &[u8]) -> std::io::Result<()> {
    link.write_all(&(message.len() as u32).to_le_bytes())?;
    link.write_all(message)
}

fn receive(link: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut len = [0; 4];
    link.read_exact(&mut len)?;
    let mut message = vec![0; u32::from_le_bytes(len) as usize];
    link.read_exact(&mut message)?;
    Ok(message)
}

fn processes_sum(world_size: usize, test: &str, sees_all: bool) {
    let mut process = ProcessRank::start(world_size, test, sees_all);
    // Ranks close in no order, and meet again in another group, with the memory of the first.
    for group in 0..2 {
        let (gpu, ranks) = process.join(world_size);
        let sums = replay_sums(&gpu, &ranks, process.rank, &PROCESS_LENS, PROCESS_STEPS, |_| ());
        drop(ranks);
        for (operation, len) in PROCESS_LENS.into_iter().enumerate() {
            let want = expected(len, world_size, operation, PROCESS_STEPS);
            assert!(sums[operation] == want, "{len} values, group {group}");
        }
    }
    for child in &mut process.children {
        assert!(child.wait().unwrap().success());
    }
}

#[test]
#[ignore = "needs two CUDA GPUs"]
fn two_gpus_of_two_processes_sum() {
    processes_sum(2, "two_gpus_of_two_processes_sum", true);
}

#[test]
#[ignore = "needs two CUDA GPUs"]
fn two_gpus_of_processes_that_see_one_sum() {
    processes_sum(2, "two_gpus_of_processes_that_see_one_sum", false);
}

#[test]
#[ignore = "needs four CUDA GPUs"]
fn four_gpus_of_four_processes_sum() {
    processes_sum(4, "four_gpus_of_four_processes_sum", true);
}

/// What is written to the memory of a process that is gone does no harm.
#[test]
#[ignore = "needs two CUDA GPUs"]
fn two_gpus_outlive_the_process_of_one() {
    const LEN: usize = 4096;
    let mut process = ProcessRank::start(2, "two_gpus_outlive_the_process_of_one", true);
    let (gpu, ranks) = process.join(2);
    let values = DeviceBuffer::zeroed(&gpu, LEN * 4).unwrap();
    ranks.all_reduce(LEN, &values).unwrap();
    let graph = Graph::record(&gpu, || (0..64).try_for_each(|_| ranks.all_reduce(LEN, &values))).unwrap();
    let start = Instant::now();
    // The other process goes on until it is killed.
    while start.elapsed() < Duration::from_millis(if process.rank == 0 { 300 } else { 30_000 }) {
        graph.replay().unwrap();
        if process.rank == 0 {
            gpu.synchronize().unwrap();
        }
    }
    // More than it takes to kill one.
    (0..500).for_each(|_| graph.replay().unwrap());
    for child in &mut process.children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    thread::sleep(Duration::from_millis(100));
    let aborted = Instant::now();
    ranks.abort();
    gpu.synchronize().unwrap();
    println!("500 x 64 sums ended {:?} after the abort", aborted.elapsed());
    assert!(aborted.elapsed() < Duration::from_secs(2));
    drop(graph);
    drop(ranks);
    assert_eq!(gpu::download::<u32>(&gpu::upload(&gpu, &[1, 2, 3]), 3), [1, 2, 3]);
}
