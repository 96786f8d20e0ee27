//! The contract, as `wit-bindgen` puts it into Rust: what every policy exports and all that it may import. Of the
//! imports a component has those that it calls. Generated code: its own lints, its own `unsafe`.
#![allow(missing_docs, unsafe_code, clippy::all)]

wit_bindgen::generate!({
    path: "../../wit",
    inline: "
        package tally:sdk;

        world required {
            include tally:policy/policy@0.1.0;
            import tally:policy/identity@0.1.0;
            import tally:policy/kernel-identity@0.1.0;
            import tally:policy/high-priority@0.1.0;
        }
    ",
    world: "tally:sdk/required",
    generate_all,
    pub_export_macro: true,
    export_macro_name: "export_scheduler",
    additional_derives: [PartialEq],
});

/// One module for each optional export, so that a policy exports only what it asks for.
macro_rules! optional {
    ($($module:ident: $macro:literal, $world:literal, $inline:literal, { $($with:tt)* };)*) => {
        $(pub mod $module {
            wit_bindgen::generate!({
                path: "../../wit",
                inline: $inline,
                world: $world,
                with: { $($with)* },
                pub_export_macro: true,
                export_macro_name: $macro,
                additional_derives: [PartialEq],
            });
        })*
    };
}

optional! {
    activity: "export_activity", "tally:sdk/activity",
        "package tally:sdk; world activity { export tally:policy/activity@0.1.0; }", {};
    units: "export_units", "tally:sdk/units",
        "package tally:sdk; world units { export tally:policy/units@0.1.0; }",
        { "tally:policy/types@0.1.0": crate::bindings::tally::policy::types };
    completions: "export_completions", "tally:sdk/completions",
        "package tally:sdk; world completions { export tally:policy/completions@0.1.0; }",
        { "tally:policy/types@0.1.0": crate::bindings::tally::policy::types };
    membership: "export_membership", "tally:sdk/membership",
        "package tally:sdk; world membership { export tally:policy/membership@0.1.0; }",
        { "tally:policy/types@0.1.0": crate::bindings::tally::policy::types };
    timer: "export_timer", "tally:sdk/timer",
        "package tally:sdk; world timer { export tally:policy/timer@0.1.0; }", {};
    state: "export_state", "tally:sdk/state",
        "package tally:sdk; world state { export tally:policy/state@0.1.0; }", {};
}
