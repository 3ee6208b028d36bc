//! Makes of a WebAssembly library the module and the JavaScript that a page loads.
//! For: `browser/build.sh`. Not here: `wasm-bindgen`'s own tool, which takes three times as long to build.
//!
//!     lockstep-bindgen LIBRARY.wasm FOLDER

use std::{error::Error, path::PathBuf};

use wasm_bindgen_cli_support::Bindgen;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [library, folder] = &arguments[..] else { return Err("usage: lockstep-bindgen LIBRARY.wasm FOLDER".into()) };
    let mut bindgen = Bindgen::new();
    bindgen.input_path(library).web(true)?.typescript(false);
    bindgen.omit_default_module_path(false).remove_name_section(true);
    Ok(bindgen.generate(folder)?)
}
