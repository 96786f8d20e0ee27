//! Writing a figure where `--svg` says.

use crate::error::CtlError;
use std::path::Path;
use tally_plot::{Figure, Theme};

pub fn write(file: &Path, figure: &Figure, dark: bool) -> Result<(), CtlError> {
    let theme = if dark { Theme::Dark } else { Theme::Light };
    let wrong = |why: String| CtlError::Usage(format!("--svg {}: {why}", file.display()));
    let svg = figure.svg(theme).map_err(|e| wrong(e.to_string()))?;
    std::fs::write(file, svg).map_err(|e| wrong(format!("the picture cannot be written: {e}")))
}
