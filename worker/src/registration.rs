//! The worker's lease: its registration stream.
