//! The contract, as `wit-bindgen` puts it into Rust. Generated code: its own
//! lints, its own `unsafe`.
#![allow(missing_docs, unsafe_code, clippy::all)]

wit_bindgen::generate!({
    path: "../../wit",
    world: "policy",
    pub_export_macro: true,
    export_macro_name: "export_component",
    additional_derives: [PartialEq],
});
