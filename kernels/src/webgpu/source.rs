//! The embedded device code: WGSL files, the includes that they share, and the variants that options make of them.
//! For: pipelines, and the tests that translate every variant.
//! Invariant: a variant follows from its source and its options alone. An option is a constant of the shader
//! (`const NAME: u32`), `#if NAME` keeps lines where it is not 0, and `#repeat i NAME` copies the lines up to its `#end` so
//! many times, with the number of the copy for each `$i`: matrices of tensor cores have names, not places in an array.

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
pub(super) const INCLUDES: [(&str, &str); 13] = [
    ("activations", include_str!("../../wgsl/include/activations.wgsl")),
    ("attention", include_str!("../../wgsl/include/attention.wgsl")),
    ("batch", include_str!("../../wgsl/include/batch.wgsl")),
    ("cached", include_str!("../../wgsl/include/cached.wgsl")),
    ("decode_rows", include_str!("../../wgsl/include/decode_rows.wgsl")),
    ("kv_cache", include_str!("../../wgsl/include/kv_cache.wgsl")),
    ("matvec", include_str!("../../wgsl/include/matvec.wgsl")),
    ("matrices", include_str!("../../wgsl/include/matrices.wgsl")),
    ("params", include_str!("../../wgsl/include/params.wgsl")),
    ("quantize", include_str!("../../wgsl/include/quantize.wgsl")),
    ("reduce", include_str!("../../wgsl/include/reduce.wgsl")),
    ("rotation", include_str!("../../wgsl/include/rotation.wgsl")),
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
    let value_of = |name: &str| options.iter().find(|(option, _)| *option == name).map(|(_, value)| *value);
    // Whether the lines of each open condition are kept.
    let mut kept: Vec<bool> = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let wrong = || Err(format!("in shader: {line}"));
        let is_kept = kept.iter().all(|kept| *kept);
        if let Some(name) = line.strip_prefix("#if ") {
            match value_of(name) {
                Some(value) => kept.push(value != 0),
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
        } else if let Some(counter) = line.strip_prefix("#repeat ") {
            let body = take_body(&mut lines).ok_or_else(|| format!("in shader: {line}"))?;
            match counter.split_once(' ').and_then(|(letter, name)| Some((letter, value_of(name)?))) {
                Some((letter, count)) if is_kept => (0..count).try_for_each(|index| {
                    expand(&body.replace(&format!("${letter}"), &index.to_string()), options, output)
                })?,
                Some(_) => {}
                None => return wrong(),
            }
        } else if let Some(name) = line.strip_prefix("#include ") {
            match INCLUDES.iter().find(|(include, _)| *include == name) {
                Some((_, text)) if is_kept => expand(text, options, output)?,
                Some(_) => {}
                None => return wrong(),
            }
        } else if line == "#end" {
            return wrong();
        } else if is_kept {
            output.push_str(line);
            output.push('\n');
        }
    }
    if kept.is_empty() { Ok(()) } else { Err(format!("{} conditions are open at the end", kept.len())) }
}

/// The lines up to the `#end` that closes them.
fn take_body(lines: &mut std::str::Lines<'_>) -> Option<String> {
    let mut body = String::new();
    let mut depth = 1;
    for line in lines {
        if line.starts_with("#repeat ") {
            depth += 1;
        } else if line == "#end" {
            depth -= 1;
        }
        if depth == 0 {
            return Some(body);
        }
        body.push_str(line);
        body.push('\n');
    }
    None
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
        for text in [
            "#endif",
            "#else",
            "#if X",
            "#include nothing",
            "#end",
            "#repeat i X",
            "#repeat i Y\n#end",
            "#repeat i\n#end",
        ] {
            assert!(Source { name: "test", text }.variant(&[("X", 1)]).is_err(), "{text}");
        }
    }

    #[test]
    fn lines_are_repeated_with_their_number() {
        let text = "#repeat i X\n#repeat j Y\n$i$j\n#end\n;\n#end\n#if NONE\n#repeat i X\n$i\n#end\n#endif";
        let variant = Source { name: "test", text }.variant(&[("X", 2), ("Y", 3), ("NONE", 0)]).unwrap();
        assert_eq!(variant.lines().skip(3).collect::<Vec<_>>(), ["00", "01", "02", ";", "10", "11", "12", ";"]);
    }
}
