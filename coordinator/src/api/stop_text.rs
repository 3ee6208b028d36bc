//! Stop texts in a stream that arrives in pieces.
//! Invariant: nothing of a stop text is ever released; what cannot be the beginning of one is released at once.

/// Looks for stop texts in one output.
pub struct StopMatcher {
    stops: Vec<String>,
    /// Text that is not released yet: always a beginning of some stop text.
    held: String,
}

/// What became certain with a piece.
#[derive(Debug, PartialEq, Eq)]
pub struct Released {
    /// Text to send.
    pub text: String,
    /// A stop text follows it: the output ends here.
    pub is_stopped: bool,
}

impl StopMatcher {
    /// Stops at the first of `stops`, none of which is empty.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new() }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &str) -> Released {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        // The stop that is complete first, so that the cut into pieces makes no difference.
        let found =
            self.stops.iter().filter_map(|stop| text.find(stop.as_str()).map(|start| (start + stop.len(), start)));
        if let Some((_, start)) = found.min() {
            text.truncate(start);
            return Released { text, is_stopped: true };
        }
        let num_held = self.stops.iter().map(|stop| longest_overlap(&text, stop)).max().unwrap_or(0);
        self.held = text.split_off(text.len() - num_held);
        Released { text, is_stopped: false }
    }

    /// Text still held when the output ends without a stop.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes of the longest end of `text` that begins `stop`.
fn longest_overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest).rev().find(|&length| text.as_bytes().ends_with(&stop.as_bytes()[..length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(ToString::to_string).collect());
        let mut text = String::new();
        for piece in pieces {
            let released = matcher.push(piece);
            text.push_str(&released.text);
            if released.is_stopped {
                return (text, true);
            }
        }
        (text + &matcher.finish(), false)
    }

    #[test]
    fn finds_stops_across_pieces() {
        assert_eq!(run(&["END"], &["abcE", "N", "Dxyz"]), ("abc".into(), true));
        assert_eq!(run(&["END"], &["abcE", "N", "d"]), ("abcENd".into(), false));
        assert_eq!(run(&["aab"], &["aaa", "b"]), ("a".into(), true));
        assert_eq!(run(&["\n\n"], &["x\n", "y\n", "\nz"]), ("x\ny".into(), true));
        assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".into(), true));
    }

    #[test]
    fn first_complete_stop_wins() {
        assert_eq!(run(&["c", "b"], &["abc"]), ("a".into(), true));
        assert_eq!(run(&["xyz", "y"], &["wx", "yz"]), ("wx".into(), true));
        assert_eq!(run(&["xyz", "y"], &["wx", "y", "z"]), ("wx".into(), true));
    }

    #[test]
    fn releases_at_once_what_cannot_be_a_stop() {
        let mut matcher = StopMatcher::new(vec!["END".into()]);
        assert_eq!(matcher.push("hello E").text, "hello ");
        assert_eq!(matcher.push("x").text, "Ex");
    }

    #[test]
    fn any_cut_of_a_text_gives_the_same() {
        let text = "one two END three";
        for first in 0..=text.len() {
            for second in first..=text.len() {
                let pieces = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(run(&["END"], &pieces), ("one two ".into(), true), "{pieces:?}");
            }
        }
    }
}
