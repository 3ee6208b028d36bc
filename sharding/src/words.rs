//! Numbers as people read them.
//! For: tables, explanations and error messages; `format_bytes` also for the command line.

/// Bytes in the largest binary unit that leaves at least one, such as `1.5 GiB`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// `1 replica`, `2 replicas`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// An estimate to three significant digits: more would claim to know better.
pub(crate) fn rounded(value: f64) -> f64 {
    if !value.is_finite() || value == 0.0 {
        return value;
    }
    // Scales of positive powers are exact, so that the result prints as short as it is.
    let exponent = 2 - value.abs().log10().floor() as i32;
    let scale = 10f64.powi(exponent.abs());
    if exponent >= 0 { (value * scale).round() / scale } else { (value / scale).round() * scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!((format_bytes(1023), format_bytes(3 << 29)), ("1023 B".to_owned(), "1.5 GiB".to_owned()));
        assert_eq!((count(1, "device"), count(0, "device")), ("1 device".to_owned(), "0 devices".to_owned()));
        for (value, text) in [(41_523.2, "41500"), (960.4, "960"), (0.012_345, "0.0123"), (9.999, "10"), (0.0, "0")] {
            assert_eq!(rounded(value).to_string(), text);
        }
    }
}
