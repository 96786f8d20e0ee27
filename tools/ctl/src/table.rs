//! Tables of text. Thirty lines do what is needed of a crate for tables: no borders, no wrapping, two alignments.

/// How a column is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Lay rows out under a header. The last column is not padded.
pub fn table(header: &[(&str, Align)], rows: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count());
        cells.chain([header[column].0.len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let mut text = String::new();
        for (i, cell) in cells.iter().enumerate() {
            let width = widths[i];
            match header[i].1 {
                Align::Right => text.push_str(&format!("{cell:>width$}")),
                Align::Left if i + 1 == cells.len() => text.push_str(cell),
                Align::Left => text.push_str(&format!("{cell:<width$}")),
            }
            if i + 1 < cells.len() {
                text.push_str("  ");
            }
        }
        text.truncate(text.trim_end().len());
        text
    };
    std::iter::once(line(header.iter().map(|h| h.0).collect()))
        .chain(rows.iter().map(|r| line(r.iter().map(String::as_str).collect())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = vec![vec!["a".into(), "10".into(), "x".into()]];
        let lines = table(&[("NAME", Align::Left), ("N", Align::Right), ("Z", Align::Left)], &rows);
        assert_eq!(lines, ["NAME   N  Z", "a     10  x"]);
    }
}
