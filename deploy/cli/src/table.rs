//! Plain-text tables: columns as wide as their widest cell, numbers to the right.

/// Rows under a header.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column names.
    pub fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(ToString::to_string).collect()] }
    }

    /// Adds a row with a cell for each column.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.rows[0].len(), "a cell for each column");
        self.rows.push(cells);
    }

    /// The table as lines, each ended by a newline.
    pub fn render(&self) -> String {
        let widths: Vec<usize> = (0..self.rows[0].len())
            .map(|column| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                let is_number = cell.starts_with(|first: char| first.is_ascii_digit());
                line += &if is_number { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["NAME", "TOKENS"]);
        table.row(vec![String::from("a-long-name"), String::from("7")]);
        assert_eq!(table.render(), "NAME         TOKENS\na-long-name       7\n");
    }
}
