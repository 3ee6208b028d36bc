//! Plain-loop oracles of the operations.
