//! What the bits of each GGUF block mean.
