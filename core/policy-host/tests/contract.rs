//! `sdk/wit/policy.wit` is `wit/policy.wit` with the two lines mended that no tool
//! accepts (`kernel-profile` as a type and as a function of one interface). Once
//! the original is mended, the copy goes and the bindings read the original.

const ORIGINAL: &str = include_str!("../../../wit/policy.wit");
const COPY: &str = include_str!("../../../sdk/wit/policy.wit");

#[test]
fn the_copy_of_the_contract_differs_in_two_lines_at_most() {
    assert_eq!(ORIGINAL.lines().count(), COPY.lines().count());
    for (original, copy) in ORIGINAL.lines().zip(COPY.lines()) {
        let mended = original
            .replace(
                "client-info, kernel-profile, level",
                "client-info, kernel-profile as profile, level",
            )
            .replace("option<kernel-profile>", "option<profile>");
        assert_eq!(mended, copy);
    }
}
