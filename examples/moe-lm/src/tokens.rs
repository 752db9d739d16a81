//! Byte pair encoding, on characters: the most common adjacent pair within a word becomes a token,
//! repeatedly.

use std::collections::{BTreeSet, HashMap};

use regex::Regex;

/// A word of the text, while its pieces grow.
struct Word {
    pieces: Vec<u32>,
    count: i64,
}

/// Adjacent pairs: their counts, and the words that contain them.
#[derive(Default)]
struct Pairs(HashMap<(u32, u32), (i64, BTreeSet<usize>)>);

/// The tokens of a text, below `vocabulary`, which is learned from it. The same text gives the same
/// tokens.
pub fn tokenize(text: &str, vocabulary: usize) -> Vec<u32> {
    let split = Regex::new(r" ?\w+|\s+|[^\w\s]+").expect("a constant that the tests try");
    let mut numbers = HashMap::new();
    let mut counts = Vec::new();
    let mut order = Vec::new();
    for word in split.find_iter(text) {
        let number = *numbers.entry(word.as_str()).or_insert(counts.len());
        if number == counts.len() {
            counts.push((word.as_str(), 0));
        }
        counts[number].1 += 1;
        order.push(number);
    }
    let (mut tokens, letters) = letters(text, vocabulary / 8);
    let piece = |letter: char| letters.get(&letter).copied().unwrap_or(0);
    let word = |&(word, count): &(&str, i64)| Word { pieces: word.chars().map(piece).collect(), count };
    let mut words: Vec<Word> = counts.iter().map(word).collect();
    let mut pairs = Pairs::default();
    for (number, word) in words.iter().enumerate() {
        pairs.add(number, word, 1);
    }
    while tokens.len() < vocabulary {
        let Some(pair) = pairs.commonest(&tokens) else { break };
        let new = tokens.len() as u32;
        tokens.push(format!("{}{}", tokens[pair.0 as usize], tokens[pair.1 as usize]));
        for number in pairs.words(pair) {
            let word = &mut words[number];
            pairs.add(number, word, -1);
            merge(&mut word.pieces, pair, new);
            pairs.add(number, word, 1);
        }
    }
    order.into_iter().flat_map(|number| words[number].pieces.iter().copied()).collect()
}

/// The commonest characters, of which tokens are made; token 0 stands for all others.
fn letters(text: &str, most: usize) -> (Vec<String>, HashMap<char, u32>) {
    let mut counts = HashMap::new();
    text.chars().for_each(|letter| *counts.entry(letter).or_insert(0u64) += 1);
    let mut common: Vec<(char, u64)> = counts.into_iter().collect();
    common.sort_unstable_by_key(|&(letter, count)| (std::cmp::Reverse(count), letter));
    common.truncate(most);
    let tokens = std::iter::once('\u{fffd}').chain(common.iter().map(|&(letter, _)| letter));
    let numbers = common.iter().zip(1..).map(|(&(letter, _), number)| (letter, number)).collect();
    (tokens.map(String::from).collect(), numbers)
}

impl Pairs {
    fn add(&mut self, number: usize, word: &Word, times: i64) {
        for pair in word.pieces.windows(2) {
            let (count, words) = self.0.entry((pair[0], pair[1])).or_default();
            *count += times * word.count;
            words.insert(number);
        }
    }

    /// Of equally common ones, the last in the order of their characters, then of their numbers:
    /// two tokens may have the same characters, joined at different places.
    fn commonest(&self, tokens: &[String]) -> Option<(u32, u32)> {
        let named = |(left, right): (u32, u32)| (&tokens[left as usize], &tokens[right as usize]);
        let worth = |(pair, (count, _)): &(&(u32, u32), &(i64, _))| (*count, named(**pair), **pair);
        let best = self.0.iter().filter(|(_, (count, _))| *count > 0).max_by(|a, b| worth(a).cmp(&worth(b)));
        best.map(|(&pair, _)| pair)
    }

    /// Words that have the pair, or had it.
    fn words(&self, pair: (u32, u32)) -> BTreeSet<usize> {
        self.0.get(&pair).map(|(_, words)| words.clone()).unwrap_or_default()
    }
}

fn merge(pieces: &mut Vec<u32>, (left, right): (u32, u32), new: u32) {
    let mut merged = Vec::with_capacity(pieces.len());
    for &piece in pieces.iter() {
        match merged.last_mut() {
            Some(last) if *last == left && piece == right => *last = new,
            _ => merged.push(piece),
        }
    }
    *pieces = merged;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_pairs_become_tokens_and_the_same_text_the_same_tokens() {
        let text = "low lower lowest, low lower";
        let tokens = tokenize(text, 64);
        assert_eq!(tokens, tokenize(text, 64));
        let letters = text.chars().count();
        assert!(tokens.len() < letters / 2, "{} tokens of {letters} characters", tokens.len());
        assert_eq!(tokens.iter().max().map(|&most| most < 64), Some(true));
        // " low" is one token each time; the first word has no space.
        let low = tokenize("a low b low c low d low", 64);
        assert_eq!([low[1], low[5]], [low[3]; 2]);
    }

    #[test]
    fn a_vocabulary_that_cannot_be_filled_is_left_small() {
        assert_eq!(tokenize("ab", 1024), [3]);
        assert!(tokenize("", 1024).is_empty());
    }

    #[test]
    fn equally_common_pairs_of_same_text_yield_later_tokens() {
        let tokens = ["a", "bc", "bc"].map(String::from);
        // Each map has an order of its own.
        for _ in 0..32 {
            let mut pairs = Pairs::default();
            for (number, second) in [1, 2].into_iter().enumerate() {
                pairs.add(number, &Word { pieces: vec![0, second], count: 1 }, 1);
            }
            assert_eq!(pairs.commonest(&tokens), Some((0, 2)));
        }
    }

    #[test]
    fn letters_beyond_the_commonest_are_one_token() {
        // Room for one letter, which is the space.
        assert_eq!(tokenize("a a a b c", 8)[0], 0);
    }
}
