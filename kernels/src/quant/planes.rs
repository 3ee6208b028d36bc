//! Bit planes: the quants of 32 columns as 32-bit words from which shifts and masks make four bytes at a time.
//! For: packing, on every device. Invariant: `bits` words hold the 32 quants; word `j` of a block, its elements
//! `4j..4j + 4`, is found at one shift of one word, and its high bits at one shift of another.
//!
//! 8 bits: word `j` is word `j` of the block. Low 4 bits (of 4, 5, 6): nibble `j / 4` of word `j % 4`; low 2 bits (of 2,
//! 3): bits `2 (j / 2)..` of each byte of word `j % 2`. Then the high bits: bit `j` of each byte of one word (3 and 5
//! bits), or bits `2 (j / 2)..` of word `j % 2` of two (6 bits).

use super::ACTIVATION_BLOCK;

/// Hands the words of a block of quants to `put`, each with its index.
pub fn planes(bits: usize, quants: &[u8; ACTIVATION_BLOCK], mut put: impl FnMut(usize, u32)) {
    let mut words = [0_u32; ACTIVATION_BLOCK / 4];
    for (word, bytes) in words.iter_mut().zip(quants.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    // The field of `width` bits from bit `from` of each element, of the words `first, first + step, ...` side by side.
    let gather = |first: usize, step: usize, from: usize, width: usize| {
        let mask = ((1 << width) - 1) * 0x0101_0101;
        let fields = words[first..].iter().step_by(step).enumerate();
        fields.fold(0, |plane, (index, word)| plane | (word >> from & mask) << (width * index))
    };
    match bits {
        8 => words.iter().enumerate().for_each(|(plane, word)| put(plane, *word)),
        4..=6 => (0..4).for_each(|plane| put(plane, gather(plane, 4, 0, 4))),
        _ => (0..2).for_each(|plane| put(plane, gather(plane, 2, 0, 2))),
    }
    match bits {
        3 => put(2, gather(0, 1, 2, 1)),
        5 => put(4, gather(0, 1, 4, 1)),
        6 => (0..2).for_each(|plane| put(4 + plane, gather(plane, 2, 4, 2))),
        _ => {}
    }
}
