//! What a device can refuse or fail at.

/// A refused call or a failed device, with the values that disagreed.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Two lengths of a call disagree.
    #[error("{operation}: {what} is {got}, expected {expected}")]
    Shape {
        /// Operation, by its one name.
        operation: &'static str,
        /// The length in question.
        what: &'static str,
        /// Length given.
        got: usize,
        /// Length needed.
        expected: usize,
    },
    /// An id of the call lies outside its table.
    #[error("{operation}: {what} {got} is not below {limit}")]
    OutOfRange {
        /// Operation, by its one name.
        operation: &'static str,
        /// The id in question.
        what: &'static str,
        /// Id given.
        got: usize,
        /// First id that is too large.
        limit: usize,
    },
    /// An id that must be unique comes twice in a call.
    #[error("{operation}: {what} {got} comes twice")]
    Duplicate {
        /// Operation, by its one name.
        operation: &'static str,
        /// The id in question.
        what: &'static str,
        /// Id given.
        got: usize,
    },
    /// The device cannot do what was asked (a type, a head size).
    #[error("{operation}: {what} is not supported on {device}")]
    Unsupported {
        /// Operation, by its one name.
        operation: &'static str,
        /// What is not supported.
        what: String,
        /// Device name.
        device: String,
    },
    /// The device could not be opened or failed.
    #[error("{device}: {what}")]
    Device {
        /// Device name.
        device: String,
        /// What happened.
        what: String,
    },
}
