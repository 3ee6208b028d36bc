//! Real connections over the loopback interface: who gets in, who does not, and what he is told.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests fail by panicking")]

mod accept;
mod link;
mod reload;
