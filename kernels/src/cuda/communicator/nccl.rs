//! NCCL's calls on one communicator.
//! For: [`CudaCommunicator`](super::CudaCommunicator).
//! Invariant: communicators are made non-blocking, so no call here waits for another rank: [`Nccl::is_ready`] tells when
//! what was asked for is done by the host. Only [`Nccl::abort`] waits, for graphs that were recorded with it.
//! Not here: how long anybody waits, and what is done when a rank is lost.

use std::{
    ffi::{CStr, c_int},
    ptr::null,
};

use cudarc::nccl::sys::{
    cudaStream_t, ncclAllReduce, ncclComm_t, ncclCommAbort, ncclCommGetAsyncError, ncclCommInitRankConfig,
    ncclConfig_t, ncclDataType_t, ncclGetErrorString, ncclGetUniqueId, ncclGetVersion, ncclRecv, ncclRedOp_t,
    ncclResult_t, ncclSend, ncclUniqueId,
};

use super::super::{DevicePointer, Gpu};
use crate::group::Collective;

/// Bytes of a [`unique_id`].
pub(super) const ID_BYTES: usize = 128;
/// What a configuration begins with.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// A number that NCCL chooses.
const UNDEFINED: c_int = c_int::MIN;

/// Version of the library, such as 22809 for 2.28.9. It must have been [probed](super::super::probe::Library) before.
pub(super) fn version() -> Result<u32, String> {
    let mut version = 0;
    // SAFETY: the pointer is to a local.
    done("ncclGetVersion", unsafe { ncclGetVersion(&raw mut version) })?;
    u32::try_from(version).map_err(|_| format!("ncclGetVersion gave {version}"))
}

/// A name under which the ranks of one communicator find each other.
pub(super) fn unique_id() -> Result<[u8; ID_BYTES], String> {
    let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: the pointer is to a local.
    done("ncclGetUniqueId", unsafe { ncclGetUniqueId(&raw mut id) })?;
    Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
}

/// One rank's side of a communicator.
pub(super) struct Nccl(ncclComm_t);

// SAFETY: NCCL binds communicators to devices, not to threads; the owner calls from one thread at a time.
unsafe impl Send for Nccl {}

impl Nccl {
    /// Begins to meet the others as `rank` of `world_size`, on the GPU whose context is the calling thread's.
    pub(super) fn begin(id: [u8; ID_BYTES], rank: usize, world_size: usize) -> Result<Self, String> {
        let id = ncclUniqueId { internal: id.map(|byte| std::ffi::c_char::from_ne_bytes([byte])) };
        let number = |value: usize| c_int::try_from(value).map_err(|_| format!("{value} ranks are too many"));
        let (rank, world_size) = (number(rank)?, number(world_size)?);
        let mut config = config(version()?);
        let mut communicator = std::ptr::null_mut();
        let begun =
            // SAFETY: the pointers are to locals, which the call copies from and writes to before it returns.
            unsafe { ncclCommInitRankConfig(&raw mut communicator, world_size, id, rank, &raw mut config) };
        let begun = done("ncclCommInitRankConfig", begun);
        if communicator.is_null() {
            return Err(begun.err().unwrap_or_else(|| "ncclCommInitRankConfig gave no communicator".to_owned()));
        }
        let begun = begun.map(|()| Self(communicator));
        begun.inspect_err(|_| {
            // SAFETY: a communicator that nobody else knows.
            unsafe { ncclCommAbort(communicator) };
        })
    }

    /// Whether the host's part of what was asked for so far is done.
    pub(super) fn is_ready(&self) -> Result<bool, String> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator lives; the pointer is to a local.
        done("ncclCommGetAsyncError", unsafe { ncclCommGetAsyncError(self.0, &raw mut state) })?;
        done("NCCL", state)?;
        Ok(state != ncclResult_t::ncclInProgress)
    }

    /// Adds `collective` over `len` values at `values` to the GPU's stream.
    ///
    /// # Safety
    /// So many values lie there, and live until the work is done.
    pub(super) unsafe fn enqueue(
        &self,
        gpu: &Gpu,
        collective: Collective,
        values: DevicePointer,
        len: usize,
        is_half: bool,
    ) -> Result<(), String> {
        let stream: cudaStream_t = gpu.stream().cu_stream().cast();
        let values = std::ptr::with_exposed_provenance_mut(values.0 as usize);
        let peer = |peer: usize| c_int::try_from(peer).map_err(|_| format!("there is no rank {peer}"));
        let element = if is_half { ncclDataType_t::ncclFloat16 } else { ncclDataType_t::ncclFloat32 };
        match collective {
            Collective::AllReduce => {
                let sum = ncclRedOp_t::ncclSum;
                // SAFETY: the caller's promise; in place is allowed.
                let result = unsafe { ncclAllReduce(values, values, len, element, sum, self.0, stream) };
                done("ncclAllReduce", result)
            }
            Collective::Send { peer: to } => {
                let to = peer(to)?;
                // SAFETY: the caller's promise.
                done("ncclSend", unsafe { ncclSend(values, len, element, to, self.0, stream) })
            }
            Collective::Receive { peer: from } => {
                let from = peer(from)?;
                // SAFETY: the caller's promise.
                done("ncclRecv", unsafe { ncclRecv(values, len, element, from, self.0, stream) })
            }
        }
    }

    /// Ends what is under way, on the GPU as well, and frees it. Waits until graphs that were recorded with it are gone.
    pub(super) fn abort(self) -> Result<(), String> {
        // SAFETY: the communicator lives, and is used up here.
        done("ncclCommAbort", unsafe { ncclCommAbort(self.0) })
    }
}

fn config(version: u32) -> ncclConfig_t {
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: CONFIG_MAGIC,
        version,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

/// Success, also of what is still under way; else the call with NCCL's words.
fn done(call: &str, result: ncclResult_t) -> Result<(), String> {
    if matches!(result, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) {
        return Ok(());
    }
    // SAFETY: takes any code.
    let text = unsafe { ncclGetErrorString(result) };
    let text = if text.is_null() {
        String::new()
    } else {
        // SAFETY: a constant of the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(format!("{call}: {result:?} ({text})"))
}
