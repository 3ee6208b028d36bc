//! The thread that owns a device and executes steps.
