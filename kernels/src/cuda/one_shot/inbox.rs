//! Memory of a rank that the other ranks of its host write to, and the ways to reach it: as it is in the same process,
//! through a handle of the driver in another one.
//! For: [`OneShot::join`](super::OneShot::join).
//! Invariant: a [`PeerInbox`] is writable by the GPU that opened it until it is dropped. Ranks of one process share the
//! memory, so there it lives as long as any of them. Memory that another process may have mapped must not be freed before
//! that process has closed it, and ranks close in no order: such inboxes are [kept](KEPT) for later groups, as long as the
//! process lives. One that ends while others write makes their work fail.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use cudarc::driver::{CudaContext, DriverError, result, sys};

use super::super::{
    DevicePointer, Gpu,
    memory::{allocate, free},
};
use crate::KernelError;

/// A UUID as Linux prints it.
const UUID_CHARS: usize = 36;
type Uuid = [u8; UUID_CHARS];

/// The driver maps memory for other processes in pieces of this size: nothing else of ours shall share one.
const GRANULE_BYTES: usize = 2 << 20;
const HANDLE_BYTES: usize = 64;
const GPU_ID_BYTES: usize = 16;

/// Inboxes of this process, for its other ranks. Their ids are unique, so a rank of another process finds none.
static LOCAL: Mutex<BTreeMap<Uuid, Weak<InboxMemory>>> = Mutex::new(BTreeMap::new());

/// Memory that other processes may still have mapped and no group of this one uses, zeroed when another group takes it. A
/// rank that was aborted sends nothing more; what one sends that does not know of the abort yet is of an operation under
/// way, whose epoch a new group reaches much later.
static KEPT: Mutex<Vec<KeptMemory>> = Mutex::new(Vec::new());

struct KeptMemory {
    /// Memory is freed with the last owner of its context.
    context: Arc<CudaContext>,
    pointer: DevicePointer,
    num_bytes: usize,
}

/// Memory of an inbox, one allocation of its own.
pub(super) struct InboxMemory {
    gpu: Arc<Gpu>,
    pointer: DevicePointer,
    num_bytes: usize,
    is_known_elsewhere: AtomicBool,
}

/// What a rank tells the others of its inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Card {
    /// Of the running kernel: equal on one host, in all of its containers.
    boot_id: Uuid,
    inbox_id: Uuid,
    gpu_id: [u8; GPU_ID_BYTES],
    /// For other processes; missing where the driver gives none.
    handle: Option<[u8; HANDLE_BYTES]>,
}

/// A rank's own inbox.
pub(super) struct Inbox {
    memory: Arc<InboxMemory>,
    card: Card,
}

/// The inbox of some rank, as its writer knows it.
pub(super) enum PeerInbox {
    Shared(Arc<InboxMemory>),
    Mapped(MappedMemory),
}

/// Memory of another process.
pub(super) struct MappedMemory {
    gpu: Arc<Gpu>,
    pointer: DevicePointer,
}

impl Card {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = [&self.boot_id[..], &self.inbox_id, &self.gpu_id].concat();
        bytes.extend(self.handle.iter().flatten());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (boot_id, bytes) = bytes.split_first_chunk()?;
        let (inbox_id, bytes) = bytes.split_first_chunk()?;
        let (gpu_id, handle) = bytes.split_first_chunk()?;
        let handle = if handle.is_empty() { None } else { Some(handle.try_into().ok()?) };
        Some(Self { boot_id: *boot_id, inbox_id: *inbox_id, gpu_id: *gpu_id, handle })
    }
}

impl InboxMemory {
    fn zeroed(gpu: &Arc<Gpu>, num_bytes: usize) -> Result<Self, KernelError> {
        let kept = {
            let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |kept: &KeptMemory| kept.context.ordinal() == gpu.ordinal() && kept.num_bytes == num_bytes;
            let index = kept.iter().position(fits);
            index.map(|index| kept.swap_remove(index))
        };
        let (pointer, is_known_elsewhere) = match kept {
            Some(kept) => (kept.pointer, AtomicBool::new(true)),
            None => (allocate(gpu, num_bytes)?, AtomicBool::new(false)),
        };
        let memory = Self { gpu: Arc::clone(gpu), pointer, num_bytes, is_known_elsewhere };
        gpu.bind()?;
        // SAFETY: inside the allocation.
        unsafe { result::memset_d8_async(pointer.0, 0, num_bytes, gpu.stream().cu_stream()) }
            .map_err(gpu.failed("cuMemsetD8Async"))?;
        Ok(memory)
    }
}

impl Drop for InboxMemory {
    fn drop(&mut self) {
        if *self.is_known_elsewhere.get_mut() {
            let context = Arc::clone(self.gpu.stream().context());
            let kept = KeptMemory { context, pointer: self.pointer, num_bytes: self.num_bytes };
            KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(kept);
        } else {
            // SAFETY: allocated in `zeroed`, freed once; the ranks that write to it have waited for their work.
            unsafe { free(&self.gpu, self.pointer) };
        }
    }
}

impl Inbox {
    /// Zeroed memory, and what others need to reach it.
    pub(super) fn new(gpu: &Arc<Gpu>, num_bytes: usize) -> Result<Self, KernelError> {
        let random = |name: &str| {
            let path = format!("/proc/sys/kernel/random/{name}");
            let content = std::fs::read(&path).map_err(|error| gpu.error(format!("{path}: {error}")))?;
            let uuid = content.first_chunk().copied();
            uuid.ok_or_else(|| gpu.error(format!("{path} has {} characters, expected {UUID_CHARS}", content.len())))
        };
        let (boot_id, inbox_id) = (random("boot_id")?, random("uuid")?);
        let gpu_id = gpu.uuid()?;
        let memory = Arc::new(InboxMemory::zeroed(gpu, num_bytes.next_multiple_of(GRANULE_BYTES))?);
        let handle = match export(gpu, memory.pointer) {
            Ok(handle) => Some(handle),
            Err(error) => {
                tracing::info!(%error, "memory cannot be shared with other processes");
                None
            }
        };
        // What the map holds is whole at any time, so a panic elsewhere does not spoil it.
        let mut local = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
        local.retain(|_, memory| memory.strong_count() > 0);
        local.insert(inbox_id, Arc::downgrade(&memory));
        Ok(Self { memory, card: Card { boot_id, inbox_id, gpu_id, handle } })
    }

    /// What the other ranks are told.
    pub(super) fn card(&self) -> Vec<u8> {
        self.card.encode()
    }

    /// This rank's own memory.
    pub(super) fn own(&self) -> PeerInbox {
        PeerInbox::Shared(Arc::clone(&self.memory))
    }

    /// Notes that other processes may open it, if `cards` has some of them.
    pub(super) fn note_other_processes(&self, cards: &[&[u8]]) {
        let local = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
        if cards.iter().filter_map(|card| Card::decode(card)).any(|card| !local.contains_key(&card.inbox_id)) {
            self.memory.is_known_elsewhere.store(true, Ordering::Relaxed);
        }
    }

    /// Opens the inbox of rank `other`, or says why it cannot be opened.
    pub(super) fn open(&self, card: &[u8], other: usize) -> Result<PeerInbox, String> {
        let card = Card::decode(card).ok_or_else(|| format!("rank {other} is of another version"))?;
        if card.boot_id != self.card.boot_id {
            return Err(format!("rank {other} is on another host"));
        }
        if card.gpu_id == self.card.gpu_id {
            return Err(format!("rank {other} is on the same GPU"));
        }
        let local = LOCAL.lock().unwrap_or_else(PoisonError::into_inner).get(&card.inbox_id).and_then(Weak::upgrade);
        let gpu = &self.memory.gpu;
        let opened = match (local, card.handle) {
            (Some(memory), _) => enable_access(gpu, &memory.gpu).map(|()| PeerInbox::Shared(memory)),
            (None, Some(handle)) => import(gpu, handle).map(PeerInbox::Mapped),
            (None, None) => return Err(format!("the memory of rank {other} cannot be shared with other processes")),
        };
        opened.map_err(|error| format!("the memory of rank {other}: {error}"))
    }
}

impl PeerInbox {
    /// Where it begins.
    pub(super) fn pointer(&self) -> DevicePointer {
        match self {
            Self::Shared(memory) => memory.pointer,
            Self::Mapped(memory) => memory.pointer,
        }
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        let closed = self.gpu.bind().and_then(|()| {
            // SAFETY: opened in `import`, closed once; the owner has waited for all work that uses it.
            unsafe { sys::cuIpcCloseMemHandle(self.pointer.0) }.result().map_err(self.gpu.failed("cuIpcCloseMemHandle"))
        });
        if let Err(error) = closed {
            tracing::error!(%error, "memory of another process could not be closed");
        }
    }
}

/// Lets the kernels of `gpu` write to all memory of `peer`, another GPU of this process.
fn enable_access(gpu: &Gpu, peer: &Gpu) -> Result<(), KernelError> {
    gpu.bind()?;
    let mut can_access = 0;
    let (own, other) = (gpu.stream().context().cu_device(), peer.stream().context().cu_device());
    // SAFETY: the pointer is to a local; the devices are open.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can_access, own, other) }
        .result()
        .map_err(gpu.failed("cuDeviceCanAccessPeer"))?;
    if can_access == 0 {
        return Err(gpu.error(format!("it has no access to the memory of cuda:{}", peer.ordinal())));
    }
    // SAFETY: both contexts are alive; access lasts as long as they do.
    match unsafe { sys::cuCtxEnablePeerAccess(peer.stream().context().cu_ctx(), 0) }.result() {
        Ok(()) | Err(DriverError(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)) => Ok(()),
        Err(code) => Err(gpu.failed("cuCtxEnablePeerAccess")(code)),
    }
}

/// A handle by which other processes can open the memory.
fn export(gpu: &Gpu, memory: DevicePointer) -> Result<[u8; HANDLE_BYTES], KernelError> {
    gpu.bind()?;
    let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
    // SAFETY: the pointer is to a local; the memory is one whole allocation.
    unsafe { sys::cuIpcGetMemHandle(&raw mut handle, memory.0) }.result().map_err(gpu.failed("cuIpcGetMemHandle"))?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Opens memory of another process for the kernels of `gpu`.
fn import(gpu: &Arc<Gpu>, handle: [u8; HANDLE_BYTES]) -> Result<MappedMemory, KernelError> {
    gpu.bind()?;
    let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    let mut pointer = 0;
    // SAFETY: the pointer is to a local; the driver refuses handles that it does not know.
    unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, handle, flags) }
        .result()
        .map_err(gpu.failed("cuIpcOpenMemHandle"))?;
    Ok(MappedMemory { gpu: Arc::clone(gpu), pointer: DevicePointer(pointer) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_come_back_whole_or_not_at_all() {
        let card = Card {
            boot_id: [b'b'; UUID_CHARS],
            inbox_id: [b'i'; UUID_CHARS],
            gpu_id: [3; GPU_ID_BYTES],
            handle: Some([4; HANDLE_BYTES]),
        };
        let bytes = card.encode();
        assert_eq!(Card::decode(&bytes), Some(card));
        assert_eq!(Card::decode(&bytes[..bytes.len() - HANDLE_BYTES]), Some(Card { handle: None, ..card }));
        assert_eq!(Card::decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Card::decode(&bytes[..40]), None);
    }
}
