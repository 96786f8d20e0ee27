//! The contract's optional interface, apart from [`crate::bindings`] so that only
//! policies which keep what they learnt export it. Generated code likewise.
#![allow(missing_docs, unsafe_code, clippy::all)]

wit_bindgen::generate!({
    path: "../../wit",
    inline: "
        package tally:sdk;

        world keeper {
            export tally:policy/state@0.1.2;
        }
    ",
    world: "tally:sdk/keeper",
    pub_export_macro: true,
    export_macro_name: "export_state",
    additional_derives: [PartialEq],
});
