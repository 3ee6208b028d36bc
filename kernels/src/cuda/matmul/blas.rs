//! Matrix products of cuBLASLt.
//! For: `dense`. Invariant: a call of the same shape uses the same algorithm as long as the process lives.

use std::{
    collections::HashMap,
    ffi::c_void,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys::{
        cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
        cublasLtMatmulDescAttributes_t, cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
        cublasLtMatrixLayout_t, cudaDataType,
    },
};

use crate::{
    KernelError,
    cuda::{DeviceBuffer, DevicePointer, Gpu, probe::Library},
};

/// Scratch that the library may use: what its fastest kernels want on Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// `CUBLAS_OP_T`.
const OPERATION_TRANSPOSE: i32 = 1;
/// Border that all of our buffers begin at.
const MAX_ALIGNMENT: u64 = 256;

/// `output[token, row] (+)= input[token, :] · weight[row, :]`, all row-major.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gemm {
    pub(super) rows: usize,
    pub(super) num_tokens: usize,
    pub(super) columns: usize,
    /// Type of `weight` `[rows, columns]` and `input` `[num_tokens, columns]`.
    pub(super) element: cudaDataType,
    pub(super) weight: DevicePointer,
    pub(super) input: DevicePointer,
    /// `[num_tokens, output_columns]`, of which `rows` are written.
    pub(super) output: DevicePointer,
    pub(super) output_columns: usize,
    pub(super) output_element: cudaDataType,
    pub(super) is_added: bool,
}

/// What an algorithm is chosen for: sizes, types, alignments of the pointers.
type Key = ([usize; 4], [cudaDataType; 2], [u64; 3]);

/// The library, opened for one GPU.
pub(super) struct Blas {
    gpu: Arc<Gpu>,
    handle: cublasLtHandle_t,
    workspace: DeviceBuffer,
    algorithms: Mutex<HashMap<Key, cublasLtMatmulAlgo_t>>,
}

// SAFETY: a handle of cuBLASLt may be used by any thread.
unsafe impl Send for Blas {}
// SAFETY: as above; the map is behind a lock.
unsafe impl Sync for Blas {}

impl Blas {
    /// Opens it; `None` if the library is not there.
    pub(super) fn open(gpu: &Arc<Gpu>) -> Result<Option<Self>, KernelError> {
        if !Library::CublasLt.is_present() {
            return Ok(None);
        }
        gpu.bind()?;
        let handle = result::create_handle().map_err(|code| failed(gpu, "cublasLtCreate", code))?;
        let workspace = DeviceBuffer::uninit(gpu, WORKSPACE_BYTES)?;
        Ok(Some(Self { gpu: Arc::clone(gpu), handle, workspace, algorithms: Mutex::default() }))
    }

    /// Starts a product after all work before.
    ///
    /// # Safety
    /// The pointers are to matrices of these sizes and types, which live until the work is done.
    pub(super) unsafe fn launch(&self, gemm: &Gemm) -> Result<(), KernelError> {
        self.gpu.bind()?;
        let fail = |code| failed(&self.gpu, "cublasLtMatmul", code);
        let call = Call::new(gemm).map_err(fail)?;
        let algorithm = self.algorithm(gemm, &call).map_err(fail)?;
        if self.gpu.is_rehearsing() {
            return Ok(());
        }
        let (alpha, beta) = (1.0_f32, if gemm.is_added { 1.0_f32 } else { 0.0 });
        let output = gemm.output.0 as *mut c_void;
        // SAFETY: descriptors and scalars live until the call returns; the matrices are the caller's promise; one
        // stream orders the uses of the workspace.
        unsafe {
            result::matmul(
                self.handle,
                call.product,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                gemm.weight.0 as *const c_void,
                call.layouts[0],
                gemm.input.0 as *const c_void,
                call.layouts[1],
                output,
                call.layouts[2],
                output,
                call.layouts[2],
                &raw const algorithm,
                self.workspace.pointer().0 as *mut c_void,
                WORKSPACE_BYTES,
                self.gpu.stream().cu_stream().cast(),
            )
        }
        .map_err(fail)
    }

    fn algorithm(&self, gemm: &Gemm, call: &Call) -> Result<cublasLtMatmulAlgo_t, CublasError> {
        let alignments = [gemm.weight, gemm.input, gemm.output].map(alignment);
        let sizes = [gemm.rows, gemm.num_tokens, gemm.columns, gemm.output_columns];
        let key = (sizes, [gemm.element, gemm.output_element], alignments);
        // An entry is whole or not there, so a panic elsewhere does not spoil the map.
        let mut algorithms = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(algorithm) = algorithms.get(&key) {
            return Ok(*algorithm);
        }
        let preference = Preference::new(alignments)?;
        let [weight, input, output] = call.layouts;
        // SAFETY: all objects live.
        let found = unsafe {
            result::get_matmul_algo_heuristic(self.handle, call.product, weight, input, output, output, preference.0)
        }?;
        algorithms.insert(key, found.algo);
        Ok(found.algo)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: created in `open`, destroyed once. A failure would leak memory and nothing else.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Largest power of two that an address is a multiple of, as far as it matters.
fn alignment(pointer: DevicePointer) -> u64 {
    (1 << pointer.0.trailing_zeros().min(8)).min(MAX_ALIGNMENT)
}

fn failed(gpu: &Gpu, call: &'static str, code: CublasError) -> KernelError {
    gpu.error(format!("{call}: {:?}", code.0))
}

/// Descriptors of one product.
struct Call {
    product: cublasLtMatmulDesc_t,
    /// Of the weight, the input and the output, column-major as the library has it.
    layouts: [cublasLtMatrixLayout_t; 3],
}

impl Call {
    fn new(gemm: &Gemm) -> Result<Self, CublasError> {
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut call = Self {
            product: result::create_matmul_desc(compute, cudaDataType::CUDA_R_32F)?,
            layouts: [ptr::null_mut(); 3],
        };
        let transposed = OPERATION_TRANSPOSE;
        let attribute = cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the descriptor lives; the value is of the attribute's type.
        unsafe {
            result::set_matmul_desc_attribute(
                call.product,
                attribute,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
        }?;
        let Gemm { rows, num_tokens, columns, .. } = *gemm;
        let sizes = [
            (gemm.element, columns, rows, columns),
            (gemm.element, columns, num_tokens, columns),
            (gemm.output_element, rows, num_tokens, gemm.output_columns),
        ];
        for (layout, (element, height, width, stride)) in call.layouts.iter_mut().zip(sizes) {
            *layout = result::create_matrix_layout(element, height as u64, width as u64, stride as i64)?;
        }
        Ok(call)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once. Failures would leak memory and nothing else.
        let _ = unsafe { result::destroy_matmul_desc(self.product) };
        for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
            // SAFETY: as above.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
    }
}

/// What an algorithm may rely on.
struct Preference(cublasLtMatmulPreference_t);

impl Preference {
    fn new(alignments: [u64; 3]) -> Result<Self, CublasError> {
        use cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(result::create_matmul_pref()?);
        let [weight, input, output] = alignments.map(|alignment| alignment as u32);
        let alignments = [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, weight),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, input),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, output),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, output),
        ];
        for (attribute, value) in alignments {
            // SAFETY: the preference lives; the value is of the attribute's type.
            unsafe { result::set_matmul_pref_attribute(preference.0, attribute, (&raw const value).cast(), 4) }?;
        }
        let workspace_bytes = WORKSPACE_BYTES;
        let attribute = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: as above.
        unsafe { result::set_matmul_pref_attribute(preference.0, attribute, (&raw const workspace_bytes).cast(), 8) }?;
        Ok(preference)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}
