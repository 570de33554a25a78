use crate::{Block, Chunk, Decoder, Sections, Timing, Visitor};
use pt_packet::{ExecMode, LastIp, MAX_LEN, Packet, encode};

struct Count(u64);
impl Visitor for Count {
    fn block(&mut self, _: &Block) {
        self.0 += 1;
    }
}

// covers: decoder/memory
#[test]
fn code_that_was_met_is_forgotten_when_there_is_too_much_of_it() {
    // Indirect jumps to ever new addresses, and PSBs among them.
    let code = [0xff, 0xe0].repeat(2000);
    let mut image = Sections::new();
    image.add(0, &code);
    let (mut last, mut trace) = (LastIp::new(), Vec::new());
    let mut put = |packet| {
        let mut out = [0; MAX_LEN];
        let len = encode(&packet, &mut last, &mut out);
        trace.extend(&out[..len]);
    };
    for jump in 0..1999 {
        if jump % 16 == 0 {
            let interrupts = false;
            put(Packet::Psb);
            put(Packet::ModeExec {
                mode: ExecMode::Bits64,
                interrupts,
            });
            put(Packet::Fup(Some(2 * jump)));
            put(Packet::PsbEnd);
        }
        put(Packet::Tip(Some(2 * jump + 2)));
    }
    let mut decoder = Decoder::new(image, Timing::default());
    let mut count = Count(0);
    decoder.decode(&Chunk::whole(&trace), &mut count);
    assert_eq!((count.0, decoder.summary().gaps), (1999, 0));
    assert!(decoder.nodes() <= super::LIMIT + 17, "{}", decoder.nodes());
}
