"""A whole new runner in one file: every agent's answer is reviewed by the next agent, and revised by its author.

VERL_USE_EXTERNAL_MODULES=recipe.peer_review python -m marl.main runner=peer_review …
"""

from dataclasses import dataclass

from marl.runners import ConversationRunner, LiveEpisode, decide, register_runner, together
from marl.runners.team_answer import Decide


@register_runner("peer_review")
class PeerReview(ConversationRunner):
    num_agents = (2, None)
    votes = True

    @dataclass
    class Config(ConversationRunner.Config):
        review: str = "Say in a sentence whether this is right."
        revise: str = "Answer again."
        decide: Decide = Decide.majority

    config: Config

    async def run(self, episode: LiveEpisode) -> str | None:
        authors = episode.agents
        reviewers = [*authors[1:], authors[0]]
        drafts = await together(author.act(author.prompt) for author in authors)
        review_prompts = [await self.shown(episode, [draft], self.config.review) for draft in drafts]
        reviews = await together(
            reviewer.act(reviewer.continue_with(text), answers=False)
            for reviewer, text in zip(reviewers, review_prompts, strict=True)
        )
        revise_prompts = [await self.shown(episode, [review], self.config.revise) for review in reviews]
        finals = await together(
            author.act(author.continue_with(text)) for author, text in zip(authors, revise_prompts, strict=True)
        )
        return await decide(self.config.decide, finals, episode)

    def most_turns(self, agents):
        return dict.fromkeys(agents, 3)
