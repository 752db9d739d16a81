//! Finds the late peer from the words that a stream still awaits.

use super::exchange::FLAGS;

/// The first peer that is awaited, and its flag, from the words of each peer, [`FLAGS`] in turn;
/// `newest` if they do not tell.
///
/// Words that have arrived stay set until all have. A peer that has sent its dispatch may have sent
/// the answering combine too, before this rank has received all dispatches. A peer whose answer is
/// here may have sent the next dispatch, before all answers are. So a peer with any word set is not
/// awaited.
pub(super) fn late(values: &[u64], newest: usize) -> (Option<usize>, usize) {
    let peers = || values.chunks_exact(FLAGS.len()).map(|words| [words[0] != 0, words[1] != 0]);
    let only = |flags: [bool; 2]| peers().any(|words| words == flags);
    let flag = match (only([true, false]), only([false, true])) {
        (true, _) => 0,
        (_, true) => 1,
        _ => newest,
    };
    (peers().position(|words| words == [false, false]), flag)
}

#[cfg(test)]
mod tests {
    use super::late;

    #[test]
    fn a_peer_is_late_of_which_no_word_has_come() {
        // Dispatches are awaited: of the third, and the first has heard all and answered.
        assert_eq!(late(&[1, 1, 1, 0, 0, 0], 1), (Some(2), 0));
        // Answers are: of the second, and the next dispatch of the first is here.
        assert_eq!(late(&[1, 1, 0, 0, 0, 1], 0), (Some(1), 1));
        // Nothing has come, or that of one peer tells not what is awaited.
        assert_eq!(late(&[0, 0, 0, 0], 1), (Some(0), 1));
        assert_eq!(late(&[1, 1, 0, 0], 0), (Some(1), 0));
        // Nobody is awaited, as far as these words say.
        assert_eq!(late(&[1, 0, 1, 1], 1), (None, 0));
        assert_eq!(late(&[], 0), (None, 0));
    }
}
