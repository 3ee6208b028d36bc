//! Every variant of every shader that a launch can ask for, by name.
//! For: tests that translate and compile all of them, so that no user meets one first.
//! Invariant: built from the same options as the launches.

use lockstep_formats::{Dtype, GgmlType};

use super::{
    attention, elementwise,
    matmul::{self, Format, Shape, Target, embed, layout::Layout},
    rope_and_store, sample,
    source::{Options, Source},
};
use crate::{ops::RopeStyle, quant::ACTIVATION_BLOCK};

/// A source with the options of one variant, but for those of the adapter: `SUBGROUPS` and `IMMEDIATES`.
pub type Variant = (&'static Source, Options);

/// Whether a variant is for adapters with subgroups alone.
pub fn needs_subgroups(options: &[(&str, u32)]) -> bool {
    let shares_keys = |(name, value): &(&str, u32)| *name == "KEY_LANES" && *value > 1;
    options.contains(&("COOPERATIVE", 1)) || options.contains(&("SUBGROUP_TEAMS", 1)) || options.iter().any(shares_keys)
}

/// Whether a variant is for Vulkan alone: its workgroups see what others wrote.
pub fn is_for_vulkan(options: &[(&str, u32)]) -> bool {
    options.contains(&("JOINS", 1))
}

/// All variants. Heads are of the sizes 33 to 512, groups of up to eight heads.
pub fn all() -> Vec<Variant> {
    let mut variants = elementwise_variants();
    variants.extend(matmul_variants());
    variants.extend(attention_variants());
    variants.push((&sample::SAMPLE, sample::OPTIONS.to_vec()));
    variants
}

fn elementwise_variants() -> Vec<Variant> {
    let threads = ("THREADS", elementwise::THREADS);
    let mut variants: Vec<Variant> = Vec::new();
    for threads in elementwise::NORM_THREADS {
        let norm = |quantize| vec![("THREADS", threads), ("QUANTIZE", quantize)];
        variants.extend([0, 1].map(|quantize| (&elementwise::RMS_NORM, norm(quantize))));
    }
    for source in [&elementwise::QUANTIZE, &elementwise::SWIGLU, &elementwise::ADD, &elementwise::GATHER_ROWS] {
        variants.push((source, vec![threads]));
    }
    variants
}

fn formats() -> Vec<Format> {
    let mut formats: Vec<Format> = GgmlType::all().filter_map(Layout::of).map(Format::Planes).collect();
    formats.extend(Dtype::ALL.map(Format::Plain));
    formats
}

fn matmul_variants() -> Vec<Variant> {
    let mut variants = Vec::new();
    for format in formats() {
        let is_plain = matches!(format, Format::Plain(_));
        let (matvec, table) =
            if is_plain { (&matmul::MATVEC_PLAIN, &embed::EMBED_PLAIN) } else { (&matmul::MATVEC, &embed::EMBED) };
        variants.push((table, embed::embed_options(format)));
        if !is_plain {
            let choices =
                Shape::BLOCKS.into_iter().flat_map(|shape| [1, 2, 4, 8].map(|num_tokens| (shape, num_tokens)));
            variants.extend(choices.map(|(shape, num_tokens)| {
                let options = matmul::matvec_blocks_options(format, shape, num_tokens, Target::SwiGlu);
                (&matmul::MATVEC_BLOCKS, options)
            }));
        }
        for target in Target::ALL {
            for num_tokens in [1, 2, 4, 8] {
                for shape in Shape::ALL {
                    variants.push((matvec, matmul::matvec_options(format, shape, num_tokens, target)));
                }
            }
            if !is_plain {
                variants.push((&matmul::BATCH, matmul::batch_options(format, target)));
                for edge in [16, 8] {
                    let options = matmul::cooperative_options(format, edge, target);
                    variants.push((&matmul::BATCH_COOPERATIVE, options));
                }
            }
        }
    }
    variants
}

fn attention_variants() -> Vec<Variant> {
    let mut variants: Vec<Variant> = Vec::new();
    for (dtype, is_parted) in Dtype::ALL.into_iter().flat_map(|dtype| [(dtype, false), (dtype, true)]) {
        for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
            let options = rope_and_store::options(dtype, is_parted, style);
            variants.push((&rope_and_store::ROPE_AND_STORE, options));
        }
        for (head_dim, group_size) in HEADS {
            // Heads that are no whole blocks are not made as blocks.
            let block_choices = if head_dim % ACTIVATION_BLOCK == 0 { &[false, true][..] } else { &[false] };
            for (work, stores, (key_lanes, joins)) in works(dtype, head_dim) {
                for (make_blocks, has_f16) in block_choices.iter().flat_map(|make| [(*make, false), (*make, true)]) {
                    let block_size = 32;
                    let shape = attention::Variant {
                        head_dim,
                        block_size,
                        group_size,
                        work,
                        make_blocks,
                        has_f16,
                        key_lanes,
                        joins,
                        stores,
                    };
                    variants.push(shape.of_cache(dtype, is_parted));
                }
            }
        }
    }
    for (head_dim, _) in HEADS {
        for make_blocks in [false, true] {
            variants.push((&attention::COMBINE, attention::combine_options(head_dim.div_ceil(4), make_blocks)));
        }
    }
    variants
}

/// Who computes, whether it stores; and of one token how many threads share keys and whether ranges are joined at once.
fn works(dtype: Dtype, head_dim: usize) -> impl Iterator<Item = (attention::Work, bool, (u32, bool))> {
    use attention::Work;
    // Subgroups of 4 threads, of more, and none.
    let adapters = [4, 8, 1].into_iter().flat_map(|lanes| [(lanes, false), (lanes, true)]);
    let decode = adapters.flat_map(|adapter| [(Work::Decode, false, adapter), (Work::Decode, true, adapter)]);
    let matrices = attention::MatrixShape::ALL.into_iter().map(|shape| (Work::Matrices(shape), false, (1, false)));
    let has_matrices = attention::has_matrices(dtype, head_dim);
    let prompts = [(Work::of_plain_prompts(head_dim), false, (1, false))];
    decode.chain(prompts).chain(matrices.filter(move |_| has_matrices))
}

/// Sizes of a head and of a group, the largest of each kind of workgroup among them.
const HEADS: [(usize, usize); 10] =
    [(33, 1), (64, 3), (80, 2), (64, 8), (128, 1), (128, 4), (128, 8), (256, 4), (256, 8), (512, 8)];
