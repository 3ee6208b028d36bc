//! The embedded device code: WGSL files, the includes that they share, and the variants that options make of them.
//! For: pipelines, and the tests that translate every variant.
//! Invariant: a variant follows from its source and its options alone. An option is a constant of the shader
//! (`const NAME: u32`), and `#if NAME` keeps lines where it is not 0; nothing else is replaced in the text.

use std::fmt::Write;

/// One file of device code with one entry point, `main`.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Its name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// Options of a variant, each with its value.
pub type Options = Vec<(&'static str, u32)>;

/// Files that others include.
const INCLUDES: [(&str, &str); 6] = [
    ("activations", include_str!("../../wgsl/include/activations.wgsl")),
    ("kv_cache", include_str!("../../wgsl/include/kv_cache.wgsl")),
    ("params", include_str!("../../wgsl/include/params.wgsl")),
    ("quantize", include_str!("../../wgsl/include/quantize.wgsl")),
    ("reduce", include_str!("../../wgsl/include/reduce.wgsl")),
    ("weights", include_str!("../../wgsl/include/weights.wgsl")),
];

impl Source {
    /// The WGSL of a variant, or the directive that is wrong.
    ///
    /// # Errors
    /// The line that names no known include or option, or closes nothing.
    pub fn variant(&self, options: &[(&'static str, u32)]) -> Result<String, String> {
        let mut output = String::new();
        // Directives come before everything else.
        for (name, directive) in [("F16", "enable f16;"), ("COOPERATIVE", "enable wgpu_cooperative_matrix;")] {
            if options.iter().any(|(option, value)| *option == name && *value != 0) {
                output.push_str(directive);
                output.push('\n');
            }
        }
        for (name, value) in options {
            // Writing to a string cannot fail.
            let _ = writeln!(output, "const {name}: u32 = {value}u;");
        }
        expand(self.text, options, &mut output)?;
        Ok(output)
    }
}

/// The bindings of a variant beside its parameters, as `(number, whether it is only read)`.
pub fn bindings(variant: &str) -> Vec<(u32, bool)> {
    let binding = |line: &str| {
        let (number, rest) = line.strip_prefix("@group(0) @binding(")?.split_once(')')?;
        Some((number.parse().ok()?, rest.contains("<storage, read>")))
    };
    variant.lines().filter_map(binding).collect()
}

/// Copies `text` line by line, as its directives say.
fn expand(text: &str, options: &[(&'static str, u32)], output: &mut String) -> Result<(), String> {
    // Whether the lines of each open condition are kept.
    let mut kept: Vec<bool> = Vec::new();
    for line in text.lines() {
        let wrong = || Err(format!("in shader: {line}"));
        let is_kept = kept.iter().all(|kept| *kept);
        if let Some(name) = line.strip_prefix("#if ") {
            match options.iter().find(|(option, _)| *option == name) {
                Some((_, value)) => kept.push(*value != 0),
                None => return wrong(),
            }
        } else if line == "#else" {
            match kept.last_mut() {
                Some(last) => *last = !*last,
                None => return wrong(),
            }
        } else if line == "#endif" {
            if kept.pop().is_none() {
                return wrong();
            }
        } else if let Some(name) = line.strip_prefix("#include ") {
            match INCLUDES.iter().find(|(include, _)| *include == name) {
                Some((_, text)) if is_kept => expand(text, options, output)?,
                Some(_) => {}
                None => return wrong(),
            }
        } else if is_kept {
            output.push_str(line);
            output.push('\n');
        }
    }
    if kept.is_empty() { Ok(()) } else { Err(format!("{} conditions are open at the end", kept.len())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_choose_lines() {
        let source = Source { name: "test", text: "a\n#if X\nb\n#if Y\nc\n#endif\n#else\nd\n#endif\ne" };
        assert_eq!(bindings("@group(0) @binding(3) var<storage, read> a: array<u32>;\nfn main() {}"), [(3, true)]);
        let lines = |x, y| {
            let text = source.variant(&[("X", x), ("Y", y)]).unwrap();
            text.lines().skip(2).collect::<String>()
        };
        assert_eq!([lines(0, 1), lines(1, 0), lines(2, 1)], ["ade", "abe", "abce"]);
        assert!(source.variant(&[("X", 1)]).is_err());
        for text in ["#endif", "#else", "#if X", "#include nothing"] {
            assert!(Source { name: "test", text }.variant(&[("X", 1)]).is_err(), "{text}");
        }
    }
}
