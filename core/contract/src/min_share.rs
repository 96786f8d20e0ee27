//! A floor for a best-effort client: the least share of GPU time that it gets of the time in which it has work.

use crate::objective::WrongObjective;

/// Label with the share that a program asks for, as in `min-share=20%`.
pub const MIN_SHARE: &str = "min-share";
/// Smallest and largest share of a client, permille. All floors of a GPU together are at most the largest.
pub const MIN_SHARE_PERMILLE: [u32; 2] = [10, 900];

const SHARE: &str = "a share of GPU time from 1% to 90%, such as 20%";

/// What a text such as `20%` or `12.5%` says, permille.
///
/// # Errors
/// If it is no share, or out of range.
pub fn min_share_permille(text: &str) -> Result<u32, WrongObjective> {
    let wrong = || WrongObjective { key: MIN_SHARE, value: text.to_owned(), expected: SHARE };
    let percent = text.strip_suffix('%').and_then(|number| number.parse::<f64>().ok());
    let permille = percent.ok_or_else(wrong)? * 10.0;
    let [least, most] = MIN_SHARE_PERMILLE.map(f64::from);
    // Not a number is in no range.
    if permille >= least && permille <= most { Ok(permille.round() as u32) } else { Err(wrong()) }
}

/// The share that labels ask for, permille; `None` without the label [`MIN_SHARE`].
///
/// # Errors
/// If the label says something else than a share, or one that is out of range.
pub fn min_share_of_labels<'a>(
    labels: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Option<u32>, WrongObjective> {
    let mut labels = labels.into_iter().filter(|(key, _)| *key == MIN_SHARE);
    labels.try_fold(None, |_, (_, value)| min_share_permille(value).map(Some))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_asks_for_a_share() {
        let of =
            |labels: &[(&'static str, &'static str)]| min_share_of_labels(labels.iter().copied());
        assert_eq!(of(&[("weight", "3")]), Ok(None));
        assert_eq!(of(&[("weight", "3"), ("min-share", "12.5%")]), Ok(Some(125)));
        assert_eq!(
            (of(&[("min-share", "1%")]), of(&[("min-share", "90%")])),
            (Ok(Some(10)), Ok(Some(900)))
        );
        for wrong in ["20", "0.5%", "91%", "-5%", "NaN%", "%", ""] {
            let why = of(&[("min-share", wrong)]).unwrap_err().to_string();
            assert!(
                why.ends_with("expected a share of GPU time from 1% to 90%, such as 20%"),
                "{why}"
            );
        }
    }
}
