//! Activations of the CUDA device: f32 rows, and beside them the forms that matmuls have asked for.
//! For: [`CudaDevice`](super::CudaDevice).
//! Invariant: the f32 rows are always there; another form is read only if it was made from the rows that are there now.
//! What a matmul asked for once is made by the producer of the rows from then on, in the producer's own kernel.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

use super::{Activations, DeviceBuffer, Forms, Gpu, matmul::MAX_MATVEC_TOKENS};
use crate::KernelError;

const NO_FORMS: Forms = Forms { tiles: false, halves: None, values: false };

/// Forms that the kernel of a producer can make beside f32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Producer {
    pub make_tiles: bool,
    pub make_halves: bool,
}

/// Rows `[max_tokens, width]`.
pub struct CudaTensor {
    gpu: Arc<Gpu>,
    max_tokens: usize,
    width: usize,
    values: Arc<DeviceBuffer>,
    /// Buffers of other forms that were ever needed. Those who read rows ask for them, hence the cell.
    others: RefCell<Others>,
    /// Forms that were asked for, of few tokens and of many.
    asked: [Cell<Forms>; 2],
    /// Forms that hold the present rows.
    current: Cell<Forms>,
}

/// Buffers beside the f32 rows.
#[derive(Default)]
struct Others {
    tiles: Option<Arc<DeviceBuffer>>,
    /// Of either 16-bit type: `current` says of which the rows in it are.
    halves: Option<Arc<DeviceBuffer>>,
}

impl CudaTensor {
    /// Zeroed rows.
    pub(super) fn zeroed(gpu: &Arc<Gpu>, max_tokens: usize, width: usize) -> Result<Self, KernelError> {
        let num_bytes = max_tokens.checked_mul(width).and_then(|len| len.checked_mul(size_of::<f32>()));
        let num_bytes = num_bytes.ok_or_else(|| gpu.error(format!("a tensor [{max_tokens}, {width}] is too large")))?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            max_tokens,
            width,
            values: Arc::new(DeviceBuffer::zeroed(gpu, num_bytes)?),
            others: RefCell::default(),
            asked: [const { Cell::new(NO_FORMS) }; 2],
            current: Cell::new(NO_FORMS),
        })
    }

    /// Values of a row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// The f32 rows.
    pub(super) fn values(&self) -> &Arc<DeviceBuffer> {
        &self.values
    }

    /// Refuses a tensor of fewer rows.
    pub(super) fn expect_tokens(&self, operation: &'static str, num_tokens: usize) -> Result<(), KernelError> {
        if num_tokens > self.max_tokens {
            let (what, got) = ("rows of a tensor", self.max_tokens);
            return Err(KernelError::Shape { operation, what, got, expected: num_tokens });
        }
        Ok(())
    }

    /// For a producer that writes f32 rows alone.
    pub(super) fn overwrite(&mut self) -> &Arc<DeviceBuffer> {
        self.current.set(NO_FORMS);
        &self.values
    }

    /// For a producer that writes the rows in the forms that were asked for, as far as it `can` make them.
    pub(super) fn produce(&mut self, num_tokens: usize, can: Producer) -> Activations {
        let asked = self.asked[class(num_tokens)].get();
        let forms = Forms {
            tiles: asked.tiles && can.make_tiles,
            halves: asked.halves.filter(|_| can.make_halves),
            values: true,
        };
        self.current.set(forms);
        self.pick(forms)
    }

    /// The first `num_tokens` rows in `forms`, and what has to be made of the f32 rows first, if anything.
    pub(super) fn request(
        &self,
        num_tokens: usize,
        forms: Forms,
    ) -> Result<(Activations, Option<Activations>), KernelError> {
        self.reserve(forms)?;
        let current = self.current.get();
        let missing = Forms {
            tiles: forms.tiles && !current.tiles,
            halves: forms.halves.filter(|_| current.halves != forms.halves),
            values: false,
        };
        self.current.set(current.and(forms));
        let asked = &self.asked[class(num_tokens)];
        asked.set(asked.get().and(forms));
        Ok((self.pick(forms), (missing != NO_FORMS).then(|| self.pick(missing))))
    }

    /// Buffers for `forms`, as far as there are any.
    fn pick(&self, forms: Forms) -> Activations {
        let others = self.others.borrow();
        Activations {
            columns: self.width,
            tiles: others.tiles.clone().filter(|_| forms.tiles),
            halves: forms.halves.zip(others.halves.clone()),
            values: forms.values.then(|| Arc::clone(&self.values)),
        }
    }

    /// Makes room for other forms. Their memory is zeroed once, before all work that is launched later.
    fn reserve(&self, forms: Forms) -> Result<(), KernelError> {
        let mut others = self.others.borrow_mut();
        let wanted = Forms {
            tiles: forms.tiles && others.tiles.is_none(),
            halves: forms.halves.filter(|_| others.halves.is_none()),
            values: false,
        };
        if wanted != NO_FORMS {
            let new = Activations::zeroed(&self.gpu, self.max_tokens, self.width, wanted)?;
            others.tiles = new.tiles.or(others.tiles.take());
            others.halves = new.halves.map(|(_, buffer)| buffer).or(others.halves.take());
        }
        Ok(())
    }
}

/// Steps of few tokens read other forms than steps of many.
fn class(num_tokens: usize) -> usize {
    usize::from(num_tokens > MAX_MATVEC_TOKENS)
}
